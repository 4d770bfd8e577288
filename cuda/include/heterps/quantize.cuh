// CUDA kernels of quantize_rows and dequantize_rows (see quantize.h).
#pragma once

#include <cstdint>

#include "heterps/row_threads.cuh"

namespace heterps {

// One warp for each row.
__global__ void quantize_rows_kernel(int64_t rows, int64_t dim, const float* __restrict__ x,
                                     int8_t* __restrict__ q, float* __restrict__ scale) {
  constexpr int kLanes = 32;
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  if (row >= rows) return;  // whole warps leave together
  const int lane = threadIdx.x % kLanes;
  float most = 0, poison = 0;  // the latter stays zero while all are finite
  for (int64_t d = lane; d < dim; d += kLanes) {
    most = fmaxf(most, fabsf(x[row * dim + d]));
    poison += x[row * dim + d] * 0.0f;
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    poison += __shfl_xor_sync(0xffffffffu, poison, step);
  }
  const float unit = poison == 0 ? most / 127.0f : nanf("");
  if (lane == 0) scale[row] = unit;
  for (int64_t d = lane; d < dim; d += kLanes) {
    const float value = unit > 0 ? rintf(x[row * dim + d] / unit) : 0.0f;
    q[row * dim + d] = static_cast<int8_t>(fminf(fmaxf(value, -127.0f), 127.0f));
  }
}

// 2^bits threads for each row.
__global__ void dequantize_rows_kernel(int bits, int64_t rows, int64_t dim,
                                       const int8_t* __restrict__ q,
                                       const float* __restrict__ scale, float* __restrict__ x) {
  const int64_t row = row_of_thread(bits);
  if (row >= rows) return;
  const float unit = scale[row];
  for (int64_t i = row * dim + thread_of_row(bits); i < (row + 1) * dim; i += int64_t{1} << bits) {
    x[i] = unit * static_cast<float>(q[i]);
  }
}

}  // namespace heterps
