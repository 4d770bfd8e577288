// CUDA kernels of gather_rows, gather_sum and gather_dot (see gather.h for what they compute).
//
// T is the type of rows, A the type of weights and sums (float, or double for double rows). Rows
// move in packs of N elements: 16 bytes where width and alignment allow, else one element.
#pragma once

#include <cstdint>

#include "heterps/row_threads.cuh"

namespace heterps {

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

// 2^bits threads for each token, which write its k rows: by rows of the output a token would be
// read k times, as far apart as experts are, and from memory each time.
template <typename T, typename A, int N>
__global__ void gather_rows_kernel(int bits, int64_t tokens, int64_t k, int64_t packs,
                                   const Pack<T, N>* __restrict__ x, const A* __restrict__ w,
                                   const int64_t* __restrict__ inverse,
                                   Pack<T, N>* __restrict__ rows) {
  const int64_t token = row_of_thread(bits);
  if (token >= tokens) return;
  for (int64_t i = thread_of_row(bits); i < packs; i += int64_t{1} << bits) {
    const Pack<T, N> pack = x[token * packs + i];
    for (int64_t pair = token * k; pair < (token + 1) * k; ++pair) {
      const int64_t position = inverse[pair];
      if (position < 0) continue;
      Pack<T, N> scaled = pack;
      if (w != nullptr) {
        for (int n = 0; n < N; ++n) {
          scaled.values[n] = static_cast<T>(w[pair] * static_cast<A>(pack.values[n]));
        }
      }
      rows[position * packs + i] = scaled;
    }
  }
}

// 2^bits threads for each row of the output; choices are summed in the order 0 .. k-1.
template <typename T, typename A, int N>
__global__ void gather_sum_kernel(int bits, int64_t tokens, int64_t k, int64_t packs,
                                  const Pack<T, N>* __restrict__ rows, const A* __restrict__ w,
                                  const int64_t* __restrict__ inverse,
                                  Pack<T, N>* __restrict__ out) {
  const int64_t token = row_of_thread(bits);
  if (token >= tokens) return;
  for (int64_t i = thread_of_row(bits); i < packs; i += int64_t{1} << bits) {
    A sums[N] = {};
    for (int64_t pair = token * k; pair < (token + 1) * k; ++pair) {
      const int64_t position = inverse[pair];
      if (position < 0) continue;
      const A scale = w == nullptr ? A{1} : w[pair];
      const Pack<T, N> pack = rows[position * packs + i];
      for (int n = 0; n < N; ++n) sums[n] += scale * static_cast<A>(pack.values[n]);
    }
    Pack<T, N> pack;
    for (int n = 0; n < N; ++n) pack.values[n] = static_cast<T>(sums[n]);
    out[token * packs + i] = pack;
  }
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
    const int64_t token = quotient(pair, k);
    for (int64_t i = lane; i < packs; i += kLanes) {
      const Pack<T, N> a = x[token * packs + i];
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
