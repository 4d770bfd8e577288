// CUDA kernels of the routing. Five small kernels in a row:
//   top-k (a warp for each token) -> counts of each tile -> scan of each expert's, a block each ->
//   scan of the experts' totals -> scatter.
// A tile is kTile consecutive pairs. The rank of a pair among equals in its tile is counted, never
// drawn from an atomic, so the order is stable and equal on every run.
#pragma once

#include <cstdint>

namespace heterps {

constexpr int kWarp = 32;
constexpr int kTile = 256;  // pairs and threads of a block; 1 KiB of shared memory
constexpr int kScanThreads = 256;
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

// Sums of `value` over the threads up to this one, and over all of a block of kScanThreads. Every
// thread calls; `warps` is shared memory that a call after the next may have again.
__device__ __forceinline__ int64_t block_sum_to(int64_t value, int64_t* warps, int64_t* total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t left = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int w = 0; w < kScanThreads / kWarp; ++w) {
    if (w == warp) before = all;
    all += warps[w];
  }
  *total = all;
  return before + sum;
}

// to[i] = the sum of the n values before i, or up to i where `with_own`, by one block; `to` may be
// `values`. `total` may be null.
__device__ __forceinline__ void scan(const int64_t* values, int64_t n, bool with_own, int64_t* to,
                                     int64_t* total) {
  __shared__ int64_t warps[2 * kScanThreads / kWarp];  // by turns
  int64_t carry = 0;                                   // equal in all threads
  int turn = 0;
  for (int64_t start = 0; start < n; start += kScanThreads, turn ^= 1) {
    const int64_t i = start + threadIdx.x;
    const int64_t value = i < n ? values[i] : 0;
    int64_t all;
    const int64_t sum = block_sum_to(value, warps + turn * (kScanThreads / kWarp), &all);
    if (i < n) to[i] = carry + sum - (with_own ? 0 : value);
    carry += all;
  }
  if (total != nullptr && threadIdx.x == 0) *total = carry;
}

// A block for each expert: counts[expert, tiles] become what comes before, of the same expert;
// offsets[expert + 1] how many it has.
__global__ void route_scan_kernel(int64_t* counts, int64_t tiles, int64_t* __restrict__ offsets) {
  int64_t* mine = counts + int64_t{blockIdx.x} * tiles;
  scan(mine, tiles, false, mine, offsets + blockIdx.x + 1);
}

// One block: the experts' numbers become their sums.
__global__ void route_offsets_kernel(int64_t experts, int64_t* offsets) {
  if (threadIdx.x == 0) offsets[0] = 0;
  scan(offsets + 1, experts, true, offsets + 1, nullptr);
}

__global__ void route_scatter_kernel(const int32_t* __restrict__ chosen, int64_t pairs,
                                     const int64_t* __restrict__ begins,
                                     const int64_t* __restrict__ offsets,
                                     int64_t* __restrict__ order, int64_t* __restrict__ inverse) {
  __shared__ int32_t tile[kTile];
  const int64_t pair = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int32_t expert = pair < pairs ? chosen[pair] : -1;
  bool is_last;
  const int rank = tile_rank(tile, expert, &is_last);
  if (expert < 0) return;
  const int64_t position =
      offsets[expert] + begins[int64_t{expert} * gridDim.x + blockIdx.x] + rank;
  order[position] = pair;
  inverse[pair] = position;
}

}  // namespace heterps
