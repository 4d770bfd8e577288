// Independent pieces of work on all cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace heterps::scheduler {

// Calls work(0) .. work(count - 1), on at most `kMostThreads` threads; the order is not fixed.
template <typename Work>
void ParallelFor(size_t count, const Work& work) {
  constexpr size_t kMostThreads = 8;
  size_t threads =
      std::min({count, kMostThreads,
                static_cast<size_t>(std::max(1U, std::thread::hardware_concurrency()))});
  std::atomic<size_t> next{0};
  std::vector<std::exception_ptr> failed(threads);
  auto run = [&](size_t self) {
    try {
      for (size_t n = next++; n < count; n = next++) work(n);
    } catch (...) {
      failed[self] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (size_t n = 1; n < threads; ++n) others.emplace_back(run, n);
  if (threads) run(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : failed) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace heterps::scheduler
