// CUDA kernels of gather_rows, gather_sum and gather_dot (see gather.h for what they compute).
//
// T is the type of rows, A the type of weights and sums (float, or double for double rows). Rows
// move in packs of N elements: 16 bytes where width and alignment allow, else one element.
#pragma once

#include <cstdint>

namespace heterps {

constexpr int kGatherThreads = 256;

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

// One thread for each pack of the output.
template <typename T, typename A, int N>
__global__ void gather_rows_kernel(int64_t rows, int64_t k, int64_t packs,
                                   const Pack<T, N>* __restrict__ x, const A* __restrict__ w,
                                   const int64_t* __restrict__ order,
                                   Pack<T, N>* __restrict__ out) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows * packs) return;
  const int64_t pair = order[i / packs];
  Pack<T, N> pack = x[pair / k * packs + i % packs];
  if (w != nullptr) {
    const A scale = w[pair];
    for (int n = 0; n < N; ++n) {
      pack.values[n] = static_cast<T>(scale * static_cast<A>(pack.values[n]));
    }
  }
  out[i] = pack;
}

// One thread for each pack of the output; choices are summed in the order 0 .. k-1.
template <typename T, typename A, int N>
__global__ void gather_sum_kernel(int64_t tokens, int64_t k, int64_t packs,
                                  const Pack<T, N>* __restrict__ rows, const A* __restrict__ w,
                                  const int64_t* __restrict__ inverse,
                                  Pack<T, N>* __restrict__ out) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= tokens * packs) return;
  const int64_t first = i / packs * k;
  A sums[N] = {};
  for (int64_t pair = first; pair < first + k; ++pair) {
    const int64_t position = inverse[pair];
    if (position < 0) continue;
    const A scale = w == nullptr ? A{1} : w[pair];
    const Pack<T, N> pack = rows[position * packs + i % packs];
    for (int n = 0; n < N; ++n) sums[n] += scale * static_cast<A>(pack.values[n]);
  }
  Pack<T, N> pack;
  for (int n = 0; n < N; ++n) pack.values[n] = static_cast<T>(sums[n]);
  out[i] = pack;
}

// One warp for each pair: strided partial sums, then a butterfly whose order is fixed.
template <typename T, typename A, int N>
__global__ void gather_dot_kernel(int64_t pairs, int64_t k, int64_t packs,
                                  const Pack<T, N>* __restrict__ x,
                                  const Pack<T, N>* __restrict__ rows,
                                  const int64_t* __restrict__ inverse, A* __restrict__ w) {
  constexpr int kLanes = 32;
  const int64_t pair = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  if (pair >= pairs) return;  // whole warps leave together
  const int lane = threadIdx.x % kLanes;
  const int64_t position = inverse[pair];
  A sum = 0;
  if (position >= 0) {
    for (int64_t i = lane; i < packs; i += kLanes) {
      const Pack<T, N> a = x[pair / k * packs + i];
      const Pack<T, N> b = rows[position * packs + i];
      for (int n = 0; n < N; ++n) sum += static_cast<A>(a.values[n]) * static_cast<A>(b.values[n]);
    }
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  if (lane == 0) w[pair] = sum;
}

}  // namespace heterps
