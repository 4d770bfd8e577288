// CUDA kernels of grouped_ffn (see grouped_ffn.h for what it computes). Tiles of rows never cross a
// group and nothing is padded in memory. How many tiles there are only the device knows, so the
// host launches as many as there can be, rows / 64 + groups, and those left over return at once.
#pragma once

#include <cstdint>

#include "heterps/grouped_ffn.h"
#include "heterps/tile_product.cuh"

namespace heterps {

__device__ inline int64_t inner_of(const FfnShape& shape) {
  return shape.activation == Activation::kSwiglu ? 2 * shape.hidden : shape.hidden;
}

// Up to 64 rows of one group; none where there are fewer tiles than blocks.
struct RowTile {
  int64_t group;
  int64_t begin;
  int64_t rows;
};

__device__ inline RowTile find_row_tile(const int64_t* offsets, int64_t groups, int64_t tile) {
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t begin = offsets[e] + tile * kTileSide;
    const int64_t rows = offsets[e + 1] - begin;
    if (rows > 0) return {e, begin, rows < kTileSide ? rows : kTileSide};
    tile -= (offsets[e + 1] - offsets[e] + kTileSide - 1) / kTileSide;
  }
  return {0, 0, 0};
}

// The tile of this block, x counting tiles of rows; every thread calls.
__device__ inline RowTile row_tile(const int64_t* offsets, int64_t groups) {
  __shared__ RowTile tile;
  if (threadIdx.x == 0) tile = find_row_tile(offsets, groups, blockIdx.x);
  __syncthreads();
  return tile;
}

template <typename S>
__device__ S logistic(S x) {
  return S{1} / (S{1} + exp(-x));
}
template <typename S>
__device__ S below_normal(S x) {
  return S(0.5) * erfc(-x * S(0.70710678118654752440));
}
template <typename S>
__device__ S normal_density(S x) {
  return S(0.39894228040143267794) * exp(S(-0.5) * x * x);
}

// `value` is that of SwiGLU.
template <typename S>
__device__ S activated(Activation kind, S x, S value) {
  switch (kind) {
    case Activation::kGelu:
      return x * below_normal(x);
    case Activation::kRelu:
      return x < S{0} ? S{0} : x;
    case Activation::kSilu:
      return x * logistic(x);
    default:
      return x * logistic(x) * value;
  }
}

// The derivative by x.
template <typename S>
__device__ S slope(Activation kind, S x, S value) {
  const S gate = logistic(x);
  const S silu = gate * (S{1} + x * (S{1} - gate));
  switch (kind) {
    case Activation::kGelu:
      return below_normal(x) + x * normal_density(x);
    case Activation::kRelu:
      return x > S{0} ? S{1} : S{0};
    case Activation::kSilu:
      return silu;
    default:
      return silu * value;
  }
}

// pre[tile, h0 ..] = the sums in memory, `at` columns further right.
template <typename T>
__device__ void store_pre(const TileMemory<T>& memory, const RowTile& tile, int64_t columns,
                          int64_t inner, int64_t at, T* pre) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kTileThreads) {
    const int row = i / kTileSide, column = i % kTileSide;
    if (row >= tile.rows || column >= columns) continue;
    pre[(tile.begin + row) * inner + at + column] = static_cast<T>(memory.at(row, column));
  }
}

// pre = rows w1 and act = activate(pre); y counts tiles of the hidden width.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    ffn_first_kernel(FfnShape shape, const T* __restrict__ rows,
                     const int64_t* __restrict__ offsets, const T* __restrict__ w1, T* pre,
                     T* __restrict__ act) {
  using S = typename TileTypes<T>::Sum;
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile(offsets, shape.groups);
  if (tile.rows == 0) return;  // the whole block
  const int64_t inner = inner_of(shape), h0 = int64_t{blockIdx.y} * kTileSide;
  const int64_t columns = shape.hidden - h0 < kTileSide ? shape.hidden - h0 : kTileSide;
  const bool gated = shape.activation == Activation::kSwiglu;
  const Operand<T> left{rows + tile.begin * shape.dim, shape.dim, 1, tile.rows, shape.dim};
  const T* weight = w1 + tile.group * shape.dim * inner;
  for (int64_t at = h0; at < inner; at += shape.hidden) {  // of SwiGLU the gate, then the value
    tile_product(shape.dim, left, Operand<T>{weight + at, inner, 1, shape.dim, columns}, memory);
    store_pre(memory, tile, columns, inner, at, pre);
  }
  // Every thread reads what it has written itself.
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kTileThreads) {
    const int row = i / kTileSide, column = i % kTileSide;
    if (row >= tile.rows || column >= columns) continue;
    const int64_t r = tile.begin + row, h = h0 + column;
    const S x = static_cast<S>(pre[r * inner + h]);
    const S value = gated ? static_cast<S>(pre[r * inner + shape.hidden + h]) : S{1};
    act[r * shape.hidden + h] = static_cast<T>(activated(shape.activation, x, value));
  }
}

// out[rows, width] = left[rows, depth] right[e], where right is [depth, width], or its transpose.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    ffn_rows_kernel(int64_t groups, int64_t width, int64_t depth, bool transposed,
                    const T* __restrict__ left, const int64_t* __restrict__ offsets,
                    const T* __restrict__ right, T* __restrict__ out) {
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile(offsets, groups);
  if (tile.rows == 0) return;
  const int64_t n0 = int64_t{blockIdx.y} * kTileSide;
  const int64_t columns = width - n0 < kTileSide ? width - n0 : kTileSide;
  const T* weight = right + tile.group * depth * width + (transposed ? n0 * depth : n0);
  tile_product(depth, Operand<T>{left + tile.begin * depth, depth, 1, tile.rows, depth},
               transposed ? Operand<T>{weight, 1, depth, depth, columns}
                          : Operand<T>{weight, width, 1, depth, columns},
               memory);
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kTileThreads) {
    const int row = i / kTileSide, column = i % kTileSide;
    if (row >= tile.rows || column >= columns) continue;
    out[(tile.begin + row) * width + n0 + column] = static_cast<T>(memory.at(row, column));
  }
}

// grad_pre from grad w2^T and pre; and act once more.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    ffn_backward_kernel(FfnShape shape, const T* __restrict__ grad,
                        const int64_t* __restrict__ offsets, const T* __restrict__ w2,
                        const T* __restrict__ pre, T* __restrict__ act, T* __restrict__ grad_pre) {
  using S = typename TileTypes<T>::Sum;
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile(offsets, shape.groups);
  if (tile.rows == 0) return;
  const int64_t inner = inner_of(shape), dim = shape.dim, h0 = int64_t{blockIdx.y} * kTileSide;
  const int64_t columns = shape.hidden - h0 < kTileSide ? shape.hidden - h0 : kTileSide;
  tile_product(dim, Operand<T>{grad + tile.begin * dim, dim, 1, tile.rows, dim},
               Operand<T>{w2 + (tile.group * shape.hidden + h0) * dim, 1, dim, dim, columns},
               memory);
  const bool gated = shape.activation == Activation::kSwiglu;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kTileThreads) {
    const int row = i / kTileSide, column = i % kTileSide;
    if (row >= tile.rows || column >= columns) continue;
    const int64_t r = tile.begin + row, h = h0 + column;
    const S x = static_cast<S>(pre[r * inner + h]);
    const S value = gated ? static_cast<S>(pre[r * inner + shape.hidden + h]) : S{1};
    const S from = memory.at(row, column);
    act[r * shape.hidden + h] = static_cast<T>(activated(shape.activation, x, value));
    grad_pre[r * inner + h] = static_cast<T>(from * slope(shape.activation, x, value));
    if (gated) {
      grad_pre[r * inner + shape.hidden + h] = static_cast<T>(from * x * logistic(x));
    }
  }
}

// out[e] = left^T right over the rows of group e = z; left is [rows, height], right [rows, width].
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    ffn_weights_kernel(int64_t height, int64_t width, const T* __restrict__ left,
                       const T* __restrict__ right, const int64_t* __restrict__ offsets,
                       T* __restrict__ out) {
  __shared__ TileMemory<T> memory;
  const int64_t first = offsets[blockIdx.z], depth = offsets[blockIdx.z + 1] - first;
  const int64_t m0 = int64_t{blockIdx.x} * kTileSide, n0 = int64_t{blockIdx.y} * kTileSide;
  const int64_t rows = height - m0 < kTileSide ? height - m0 : kTileSide;
  const int64_t columns = width - n0 < kTileSide ? width - n0 : kTileSide;
  tile_product(depth, Operand<T>{left + first * height + m0, 1, height, rows, depth},
               Operand<T>{right + first * width + n0, width, 1, depth, columns}, memory);
  T* to = out + int64_t{blockIdx.z} * height * width;
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kTileThreads) {
    const int row = i / kTileSide, column = i % kTileSide;
    if (row >= rows || column >= columns) continue;
    to[(m0 + row) * width + n0 + column] = static_cast<T>(memory.at(row, column));
  }
}

}  // namespace heterps
