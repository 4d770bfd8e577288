// CUDA kernels of the row cache (see row_cache.h).
#pragma once

#include <cstdint>

#include "heterps/row_cache.h"

namespace heterps {

constexpr int kCacheThreads = 256;

// One warp for each key, a lane for each way.
__global__ void row_cache_find_kernel(CacheState cache, bool lfu, int64_t tick, int64_t n,
                                      const int64_t* __restrict__ keys,
                                      int64_t* __restrict__ slots) {
  constexpr int kLanes = 32;
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  if (i >= n) return;  // whole warps leave together
  const int lane = threadIdx.x % kLanes;
  const int64_t key = keys[i];
  const int64_t s = cache_set(key, cache.sets) * cache.ways + lane;
  const bool found = lane < cache.ways && cache.keys[s] == key && cache.used[s] >= 0;
  const unsigned lanes = __ballot_sync(0xffffffffu, found);
  if (lanes == 0 && lane == 0) slots[i] = -1;
  if (!found) return;
  slots[i] = s;
  cache.used[s] = tick;
  cache.score[s] = lfu ? cache.score[s] + 1 : tick;
}

// One thread for each set that is asked for: it takes the keys of its set in order.
__global__ void row_cache_admit_kernel(CacheState cache, bool lfu, int64_t tick, int64_t n,
                                       const int64_t* __restrict__ keys,
                                       const int64_t* __restrict__ order,
                                       int64_t* __restrict__ slots, int64_t* __restrict__ left,
                                       uint8_t* __restrict__ evicted) {
  int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (p >= n) return;
  const int64_t set = cache_set(keys[order[p]], cache.sets);
  if (p > 0 && cache_set(keys[order[p - 1]], cache.sets) == set) return;
  for (; p < n && cache_set(keys[order[p]], cache.sets) == set; ++p) {
    const int64_t i = order[p];
    cache_admit(cache, lfu, tick, keys[i], slots + i, left + i, evicted + i);
  }
}

}  // namespace heterps
