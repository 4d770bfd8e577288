// Runs of neighbouring elements that are read and written together, 16 bytes.
#pragma once

#include <cstdint>

#include "heterps/ptx.cuh"

namespace heterps {

template <typename T>
constexpr int kRun = 16 / sizeof(T);

// A run in memory, of which `room` elements are there; at once where `whole`, that is where all
// runs are there and aligned.
template <typename T>
struct alignas(16) Run {
  T values[kRun<T>];
};
template <typename T, typename S>
__device__ void store_run(T* to, const S* sums, int64_t room, bool whole) {
  Run<T> run;
  for (int n = 0; n < kRun<T>; ++n) run.values[n] = static_cast<T>(sums[n]);
  if (whole) {
    store_16_bytes(to, &run);
  } else {
    for (int n = 0; n < kRun<T> && n < room; ++n) to[n] = run.values[n];
  }
}
template <typename S, typename T>
__device__ void load_run(S* to, const T* from, int64_t room, bool whole) {
  Run<T> run;
  if (whole) {
    run = *reinterpret_cast<const Run<T>*>(from);
  } else {
    for (int n = 0; n < kRun<T>; ++n) run.values[n] = n < room ? from[n] : static_cast<T>(0.0f);
  }
  for (int n = 0; n < kRun<T>; ++n) to[n] = static_cast<S>(run.values[n]);
}
template <typename T>
__device__ bool whole_runs(const T* a, const T* b, int64_t widths) {
  const auto addresses = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  return addresses % 16 == 0 && widths % kRun<T> == 0;
}

}  // namespace heterps
