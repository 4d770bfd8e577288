// A few threads shared by all tables of the process, for large batches.
#pragma once

#include <cstddef>
#include <functional>

namespace heterps::ps {

// How many threads ParallelFor has at most.
size_t Threads();

// Calls task(i) for every i < n, on this thread and on idle pool threads; returns when all are
// done. The first exception is thrown here. Safe after fork: the child starts its own pool.
void ParallelFor(size_t n, const std::function<void(size_t)>& task);

}  // namespace heterps::ps
