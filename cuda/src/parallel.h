// Loops over the cores. With OpenMP, whose threads torch and its BLAS use too: no second pool
// competes for the cores. Without it, in one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace heterps {

// Calls work(i) for every i < n, in any order, on at most `threads` threads. The first exception
// is thrown again when all have returned.
template <typename Work>
void parallel_for(int64_t n, int threads, const Work& work) {
#ifdef _OPENMP
  if (threads > 1 && n > 1) {
    std::exception_ptr error;
    std::atomic<bool> failed{false};
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(static_cast<int>(n < threads ? n : threads))
    for (int64_t i = 0; i < n; ++i) {
      if (failed.load(std::memory_order_relaxed)) continue;
      try {
        work(i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  (void)threads;
  for (int64_t i = 0; i < n; ++i) work(i);
}

// Calls work(begin, end) for parts of 0 .. n that each hold about `grain` of `cost * n`, so that
// little work stays on one thread.
template <typename Work>
void parallel_parts(int64_t n, int64_t cost, int threads, const Work& work) {
  constexpr int64_t kGrain = 32768;
  int64_t part = cost > 0 ? (kGrain + cost - 1) / cost : n;
  if (part < 1) part = 1;
  const int64_t even = (n + 4 * threads - 1) / (4 * threads);
  if (part < even) part = even;
  const int64_t parts = n > 0 ? (n + part - 1) / part : 0;
  parallel_for(parts, threads, [&](int64_t i) {
    const int64_t begin = i * part;
    work(begin, begin + part < n ? begin + part : n);
  });
}

}  // namespace heterps
