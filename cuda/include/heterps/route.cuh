// CUDA kernels of the routing. Four small kernels in a row:
//   top-k (a warp for each token) -> counts of each tile -> scan over (expert, tile) -> scatter.
// A tile is kTile consecutive pairs. The rank of a pair among equals in its tile is counted, never
// drawn from an atomic, so the order is stable and equal on every run.
#pragma once

#include <cstdint>

namespace heterps {

constexpr int kWarp = 32;
constexpr int kTile = 256;          // pairs and threads of a block; 1 KiB of shared memory
constexpr int kScanThreads = 1024;  // 8 KiB of shared memory
constexpr unsigned kAllLanes = 0xffffffffu;

// A candidate in the order of choice: greater value first, then lower index.
struct Candidate {
  float value;
  int32_t index;
};

__device__ __forceinline__ bool before(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

__device__ __forceinline__ Candidate warp_first(Candidate mine) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Candidate other{__shfl_xor_sync(kAllLanes, mine.value, step),
                          __shfl_xor_sync(kAllLanes, mine.index, step)};
    if (before(other, mine)) mine = other;
  }
  return mine;
}

// One warp for each token, k rounds: the first candidate after the one chosen last. Needs no list
// of the chosen, hence no limit on experts or k; the row stays in L1 between rounds.
__global__ void route_top_k_kernel(const float* __restrict__ logits, int64_t tokens,
                                   int32_t experts, int32_t k, int32_t* __restrict__ chosen) {
  const int64_t token = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  if (token >= tokens) return;  // whole warps leave together
  const int32_t lane = threadIdx.x % kWarp;
  const float* row = logits + token * experts;
  const float lowest = -INFINITY;
  Candidate last{INFINITY, -1};  // comes before every real candidate
  for (int32_t j = 0; j < k; ++j) {
    Candidate mine{lowest, INT32_MAX};  // comes after every real candidate
    for (int32_t e = lane; e < experts; e += kWarp) {
      const float logit = row[e];
      const Candidate next{isnan(logit) ? lowest : logit, e};
      if (before(last, next) && before(next, mine)) mine = next;
    }
    last = warp_first(mine);
    if (lane == 0) chosen[token * k + j] = last.index;
  }
}

// Rank of this thread's pair among the earlier pairs of the tile with the same expert, and whether
// it is the last of them. `tile` is shared memory of kTile ints; every thread of the block calls.
__device__ __forceinline__ int tile_rank(int32_t* tile, int32_t expert, bool* is_last) {
  tile[threadIdx.x] = expert;
  __syncthreads();
  int rank = 0;
  bool later = false;
  for (int i = 0; i < kTile; ++i) {
    const bool same = tile[i] == expert;
    rank += same && i < static_cast<int>(threadIdx.x);
    later = later || (same && i > static_cast<int>(threadIdx.x));
  }
  *is_last = !later;
  return rank;
}

// counts[expert, tile]; the caller has zeroed them.
__global__ void route_count_kernel(const int32_t* __restrict__ chosen, int64_t pairs,
                                   int64_t* __restrict__ counts) {
  __shared__ int32_t tile[kTile];
  const int64_t pair = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int32_t expert = pair < pairs ? chosen[pair] : -1;
  bool is_last;
  const int rank = tile_rank(tile, expert, &is_last);
  if (expert >= 0 && is_last) counts[int64_t{expert} * gridDim.x + blockIdx.x] = rank + 1;
}

// One block: exclusive scan of counts[experts, tiles] in place; offsets are the scan's values where
// each expert begins, and the total.
__global__ void route_scan_kernel(int64_t* __restrict__ counts, int64_t experts, int64_t tiles,
                                  int64_t* __restrict__ offsets) {
  __shared__ int64_t sums[kScanThreads];
  const int64_t total = experts * tiles;
  int64_t carry = 0;  // equal in all threads
  for (int64_t start = 0; start < total; start += kScanThreads) {
    const int64_t i = start + threadIdx.x;
    const int64_t count = i < total ? counts[i] : 0;
    sums[threadIdx.x] = count;
    __syncthreads();
    for (int step = 1; step < kScanThreads; step *= 2) {
      const int64_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
      __syncthreads();
      sums[threadIdx.x] += left;
      __syncthreads();
    }
    if (i < total) {
      const int64_t begin = carry + sums[threadIdx.x] - count;
      counts[i] = begin;
      if (i % tiles == 0) offsets[i / tiles] = begin;
    }
    carry += sums[kScanThreads - 1];
    __syncthreads();  // before the next round overwrites the sums
  }
  if (threadIdx.x == 0) offsets[experts] = carry;
}

__global__ void route_scatter_kernel(const int32_t* __restrict__ chosen, int64_t pairs,
                                     const int64_t* __restrict__ begins,
                                     int64_t* __restrict__ order, int64_t* __restrict__ inverse) {
  __shared__ int32_t tile[kTile];
  const int64_t pair = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int32_t expert = pair < pairs ? chosen[pair] : -1;
  bool is_last;
  const int rank = tile_rank(tile, expert, &is_last);
  if (expert < 0) return;
  const int64_t position = begins[int64_t{expert} * gridDim.x + blockIdx.x] + rank;
  order[position] = pair;
  inverse[pair] = position;
}

}  // namespace heterps
