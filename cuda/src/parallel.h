// Loops over the cores. With OpenMP, whose threads torch and its BLAS use too: no second pool
// competes for the cores. Without it, in one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace heterps {

// Calls work(i) for every i < n, on at most `threads` threads. Each has a range of its own, which
// it goes through in order, so that what follows i is most often done by the same thread, and as
// the range is the same in the next loop, finds in its cache what that thread left there; who is
// done takes over from the others. The first exception is thrown again when all have returned.
template <typename Work>
void parallel_for(int64_t n, int threads, const Work& work) {
#ifdef _OPENMP
  if (threads > 1 && n > 1) {
    struct alignas(64) Range {
      std::atomic<int64_t> next;
      int64_t end;
    };
    const int team = static_cast<int>(n < threads ? n : threads);
    const std::unique_ptr<Range[]> ranges(new Range[team]);
    for (int t = 0; t < team; ++t) {
      ranges[t].next.store(n * t / team, std::memory_order_relaxed);
      ranges[t].end = n * (t + 1) / team;
    }
    std::exception_ptr error;
    std::atomic<bool> failed{false};
    // There may be fewer threads than were asked for.
#pragma omp parallel num_threads(team)
    for (int t = 0; t < team; ++t) {
      Range& range = ranges[(omp_get_thread_num() + t) % team];
      for (;;) {
        const int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= range.end || failed.load(std::memory_order_relaxed)) break;
        try {
          work(i);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
        }
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  (void)threads;
  for (int64_t i = 0; i < n; ++i) work(i);
}

// Calls work(begin, end) for parts of 0 .. n that each hold at least a grain of `cost * n`, as many
// for each thread where there are enough, so that little work stays on one thread.
template <typename Work>
void parallel_parts(int64_t n, int64_t cost, int threads, const Work& work) {
  constexpr int64_t kGrain = 32768;
  constexpr int64_t kParts = 4;  // for each thread
  int64_t parts = n * cost / kGrain;
  if (parts > kParts * threads) parts = kParts * threads;
  if (parts > threads) parts = parts / threads * threads;
  if (parts < 1) parts = 1;
  if (parts > n) parts = n;
  parallel_for(parts, threads, [&](int64_t i) { work(n * i / parts, n * (i + 1) / parts); });
}

}  // namespace heterps
