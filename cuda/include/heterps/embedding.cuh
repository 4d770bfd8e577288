// CUDA kernels of the pooled embedding look-ups (see embedding.h). A long segment is summed by one
// owner in order: simple and repeatable, and slow for an id that fills most of a batch.
#pragma once

#include <cstdint>

#include "heterps/embedding.h"
#include "heterps/row_threads.cuh"

namespace heterps {

// 2^bits threads for each row of the output.
template <typename T, typename S>
__global__ void embedding_pool_kernel(int bits, PoolShape shape, PoolInputs in,
                                      const T* __restrict__ table, T* __restrict__ out) {
  const int64_t bag = row_of_thread(bits);
  if (bag >= shape.bags) return;
  const S* scale = static_cast<const S*>(in.scale);
  const int64_t begin = in.offsets[bag], end = in.offsets[bag + 1];
  for (int64_t d = thread_of_row(bits); d < shape.dim; d += int64_t{1} << bits) {
    S sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      const S factor = scale == nullptr ? S{1} : scale[j];
      sum += factor * static_cast<S>(table[in.ids[j] * shape.dim + d]);
    }
    out[bag * shape.dim + d] = static_cast<T>(sum);
  }
}

__device__ inline bool begins_segment(const SegmentInputs& in, int64_t p) {
  return p == 0 || in.sorted[p] != in.sorted[p - 1];
}

// Element d of the gradient of the segment that begins at p.
template <typename T, typename S>
__device__ S segment_sum(const PoolShape& shape, const SegmentInputs& in, int64_t p, int64_t d) {
  const int64_t id = in.sorted[p];
  const T* grad = static_cast<const T*>(in.grad);
  const S* scale = static_cast<const S*>(in.scale);
  S sum = 0;
  for (; p < shape.ids && in.sorted[p] == id; ++p) {
    const int64_t i = in.source[p];
    const S factor = scale == nullptr ? S{1} : scale[i];
    sum += factor * static_cast<S>(grad[in.bag[i] * shape.dim + d]);
  }
  return sum;
}

// 2^bits threads for each row of the output.
template <typename T, typename S>
__global__ void embedding_segments_kernel(int bits, PoolShape shape, SegmentInputs in,
                                          T* __restrict__ rows) {
  const int64_t p = row_of_thread(bits);
  if (p >= shape.ids) return;
  const bool begins = begins_segment(in, p);
  for (int64_t d = thread_of_row(bits); d < shape.dim; d += int64_t{1} << bits) {
    rows[p * shape.dim + d] =
        begins ? static_cast<T>(segment_sum<T, S>(shape, in, p, d)) : static_cast<T>(0.0f);
  }
}

// One warp for each sorted id; those inside a segment return at once.
template <typename T, typename S>
__global__ void embedding_update_kernel(PoolShape shape, SegmentInputs in, RowOptimizer optimizer,
                                        T* __restrict__ table, S* __restrict__ state) {
  constexpr int kLanes = 32;
  const int64_t p = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  if (p >= shape.ids || !begins_segment(in, p)) return;  // whole warps leave together
  const int lane = threadIdx.x % kLanes;
  const int64_t id = in.sorted[p];
  const S rate = static_cast<S>(optimizer.rate), epsilon = static_cast<S>(optimizer.epsilon);
  S divisor = 1;
  if (optimizer.rule == RowRule::kRowwiseAdagrad) {
    S squares = 0;
    for (int64_t d = lane; d < shape.dim; d += kLanes) {
      const S g = segment_sum<T, S>(shape, in, p, d);
      squares += g * g;
    }
    for (int step = kLanes / 2; step > 0; step /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, step);
    }
    const S sum = state[id] + squares / static_cast<S>(shape.dim);
    __syncwarp();  // all have read the old sum
    if (lane == 0) state[id] = sum;
    divisor = sqrt(sum) + epsilon;
  }
  for (int64_t d = lane; d < shape.dim; d += kLanes) {
    const S g = segment_sum<T, S>(shape, in, p, d);
    if (optimizer.rule == RowRule::kAdagrad) {
      S& sum = state[id * shape.dim + d];
      sum += g * g;
      divisor = sqrt(sum) + epsilon;
    }
    T& w = table[id * shape.dim + d];
    w = static_cast<T>(static_cast<S>(w) - rate * (g / divisor));
  }
}

}  // namespace heterps
