// What a grouped product is made of, from the offsets of its groups: the host never learns them.
#pragma once

#include <cstdint>

#include "heterps/grouped_product.h"
#include "heterps/run.cuh"

namespace heterps {

constexpr int kGroupThreads = 128;

// A thread for each group.
template <typename T>
__global__ void group_arrays_kernel(ProductKind kind, int64_t groups, int64_t depth, int64_t width,
                                    const int64_t* __restrict__ offsets, const T* left,
                                    const T* right, T* out, GroupArrays arrays) {
  const int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (e >= groups) return;
  const int64_t first = offsets[e], rows = offsets[e + 1] - first;
  const bool weights = kind == ProductKind::kWeights;
  int32_t* shape = arrays.shapes + 3 * e;
  // Weights of a group without rows are zero (see zero_empty_kernel): a sum over nothing is no
  // product.
  shape[0] = static_cast<int32_t>(weights ? (rows > 0 ? depth : 0) : rows);
  shape[1] = static_cast<int32_t>(width);
  shape[2] = static_cast<int32_t>(weights ? rows : depth);
  arrays.left[e] = left + first * depth;
  arrays.right[e] = right + (weights ? first * width : e * depth * width);
  arrays.out[e] = out + (weights ? e * depth * width : first * width);
  arrays.left_pitch[e] = depth;
  arrays.right_pitch[e] = kind == ProductKind::kTransposed ? depth : width;
  arrays.out_pitch[e] = width;
}

// out[e] = 0, of `size` elements, where group e = y has no rows.
template <typename T>
__global__ void zero_empty_kernel(int64_t size, const int64_t* __restrict__ offsets,
                                  T* __restrict__ out) {
  const int64_t e = blockIdx.y;
  if (offsets[e] < offsets[e + 1]) return;
  Run<T> zeros;
  for (T& value : zeros.values) value = static_cast<T>(0.0f);
  auto* to = reinterpret_cast<Run<T>*>(out + e * size);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size / kRun<T>; i += step) {
    to[i] = zeros;
  }
}

}  // namespace heterps
