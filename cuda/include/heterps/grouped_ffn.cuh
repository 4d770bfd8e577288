// CUDA kernels of grouped_ffn (see grouped_ffn.h for what it computes). Tiles of rows never cross a
// group and nothing is padded in memory. How many tiles there are only the device knows, so the
// host launches as many as there can be, rows / side + groups, and those left over return at once.
// Blocks of one tile of rows follow each other: the rows are read again from the cache, and so are
// the weights by the group's next tile.
#pragma once

#include <cstdint>

#include "heterps/activation.cuh"
#include "heterps/grouped_ffn.h"
#include "heterps/run.cuh"
#include "heterps/tile_product.cuh"

namespace heterps {

__device__ inline int64_t inner_of(const FfnShape& shape) {
  return shape.activation == Activation::kSwiglu ? 2 * shape.hidden : shape.hidden;
}

// Rows of one group, as many as a tile has or what is left of them; none where there are fewer
// tiles than blocks.
struct RowTile {
  int64_t group;
  int64_t begin;
  int64_t rows;
};

// Each warp finds it on its own, 32 groups at a time.
__device__ inline RowTile find_row_tile(const int64_t* offsets, int64_t groups, int64_t tile,
                                        int side) {
  constexpr int kLanes = 32;
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % kLanes;
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int64_t e = first + lane;
    const int64_t begin = e < groups ? offsets[e] : 0, end = e < groups ? offsets[e + 1] : 0;
    const int64_t tiles = (end - begin + side - 1) / side;
    int64_t upto = tiles;  // of these groups up to this one
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t left = __shfl_up_sync(kAll, upto, step);
      if (lane >= step) upto += left;
    }
    const unsigned behind = __ballot_sync(kAll, upto > tile);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int64_t mine = begin + (tile - upto + tiles) * side;
      const int64_t at = __shfl_sync(kAll, mine, owner);
      const int64_t rows = __shfl_sync(kAll, end, owner) - at;
      return {first + owner, at, rows < side ? rows : side};
    }
    tile -= __shfl_sync(kAll, upto, kLanes - 1);
  }
  return {0, 0, 0};
}

// What a block works on: `across` tiles of columns for each tile of rows.
template <typename T>
__device__ RowTile row_tile(const int64_t* offsets, int64_t groups, unsigned across) {
  return find_row_tile(offsets, groups, blockIdx.x / across, Tile<T>::kSide);
}

// pre = rows w1 and act = activate(pre). Of SwiGLU a tile has gates and values of half as many
// hidden units, so that the rows are read once for both.
template <typename T>
__global__ void __launch_bounds__(Tile<T>::kThreads, 2)
    ffn_first_kernel(FfnShape shape, unsigned across, const T* __restrict__ rows,
                     const int64_t* __restrict__ offsets, const T* __restrict__ w1,
                     T* __restrict__ pre, T* __restrict__ act) {
  using Sum = typename Tile<T>::Sum;
  constexpr int kSide = Tile<T>::kSide, N = kRun<T>;
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile<T>(offsets, shape.groups, across);
  if (tile.rows == 0) return;  // the whole block
  const bool gated = shape.activation == Activation::kSwiglu;
  const int64_t inner = inner_of(shape), side = gated ? kSide / 2 : kSide;
  const int64_t h0 = blockIdx.x % across * side;
  const int64_t columns = shape.hidden - h0 < side ? shape.hidden - h0 : side;
  const Operand<T> left{rows + tile.begin * shape.dim, shape.dim, tile.rows};
  const Operand<T> right{w1 + tile.group * shape.dim * inner + h0, inner, columns,
                         gated ? shape.hidden : 0};
  Tile<T> product;
  product.template multiply<true, false>(shape.dim, left, right, memory);
  const bool whole = whole_runs(pre, act, shape.hidden);
  // What the backward will read is what is activated: `pre` as it is stored.
  const auto stored = [](const Sum* sums, Sum* to) {
    for (int n = 0; n < N; ++n) to[n] = static_cast<Sum>(static_cast<T>(sums[n]));
  };
  if (gated) {
    each_gated_run<T>(
        product, tile.rows, memory, [&](int row, int column, const Sum* gates, const Sum* values) {
          if (row >= tile.rows || column >= columns) return;
          const int64_t r = tile.begin + row, h = h0 + column, room = columns - column;
          Sum x[N], y[N], result[N];
          stored(gates, x);
          stored(values, y);
          for (int n = 0; n < N; ++n) result[n] = activated(shape.activation, x[n], y[n]);
          store_run(pre + r * inner + h, gates, room, whole);
          store_run(pre + r * inner + shape.hidden + h, values, room, whole);
          store_run(act + r * shape.hidden + h, result, room, whole);
        });
  } else {
    each_run<T>(product, tile.rows, memory, [&](int row, int column, const Sum* sums) {
      if (row >= tile.rows || column >= columns) return;
      const int64_t r = tile.begin + row, h = h0 + column, room = columns - column;
      Sum x[N], result[N];
      stored(sums, x);
      for (int n = 0; n < N; ++n) result[n] = activated(shape.activation, x[n], Sum{1});
      store_run(pre + r * inner + h, sums, room, whole);
      store_run(act + r * shape.hidden + h, result, room, whole);
    });
  }
}

// out[rows, width] = left[rows, depth] right[e], where right is [depth, width], or its transpose.
template <typename T, bool kTransposed>
__global__ void __launch_bounds__(Tile<T>::kThreads, 2)
    ffn_rows_kernel(int64_t groups, int64_t width, int64_t depth, unsigned across,
                    const T* __restrict__ left, const int64_t* __restrict__ offsets,
                    const T* __restrict__ right, T* __restrict__ out) {
  constexpr int kSide = Tile<T>::kSide;
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile<T>(offsets, groups, across);
  if (tile.rows == 0) return;
  const int64_t n0 = int64_t{blockIdx.x % across} * kSide;
  const int64_t columns = width - n0 < kSide ? width - n0 : kSide;
  const T* weight = right + tile.group * depth * width + (kTransposed ? n0 * depth : n0);
  Tile<T> product;
  product.template multiply<true, kTransposed>(
      depth, Operand<T>{left + tile.begin * depth, depth, tile.rows},
      Operand<T>{weight, kTransposed ? depth : width, columns}, memory);
  const bool whole = whole_runs(out, out, width);
  each_run<T>(
      product, tile.rows, memory, [&](int row, int column, const typename Tile<T>::Sum* sums) {
        if (row >= tile.rows || column >= columns) return;
        store_run(out + (tile.begin + row) * width + n0 + column, sums, columns - column, whole);
      });
}

// grad_pre from grad w2^T and pre; and act once more.
template <typename T>
__global__ void __launch_bounds__(Tile<T>::kThreads, 2)
    ffn_backward_kernel(FfnShape shape, unsigned across, const T* __restrict__ grad,
                        const int64_t* __restrict__ offsets, const T* __restrict__ w2,
                        const T* __restrict__ pre, T* __restrict__ act, T* __restrict__ grad_pre) {
  using Sum = typename Tile<T>::Sum;
  constexpr int kSide = Tile<T>::kSide, N = kRun<T>;
  __shared__ TileMemory<T> memory;
  const RowTile tile = row_tile<T>(offsets, shape.groups, across);
  if (tile.rows == 0) return;
  const int64_t inner = inner_of(shape), dim = shape.dim;
  const int64_t h0 = int64_t{blockIdx.x % across} * kSide;
  const int64_t columns = shape.hidden - h0 < kSide ? shape.hidden - h0 : kSide;
  Tile<T> product;
  product.template multiply<true, true>(
      dim, Operand<T>{grad + tile.begin * dim, dim, tile.rows},
      Operand<T>{w2 + (tile.group * shape.hidden + h0) * dim, dim, columns}, memory);
  const bool gated = shape.activation == Activation::kSwiglu;
  const bool whole = whole_runs(pre, act, shape.hidden) && whole_runs<T>(grad_pre, grad_pre, 0);
  each_run<T>(product, tile.rows, memory, [&](int row, int column, const Sum* from) {
    if (row >= tile.rows || column >= columns) return;
    const int64_t r = tile.begin + row, h = h0 + column, room = columns - column;
    const int64_t gate = r * inner + h;
    Sum x[N], y[N], result[N], of_gate[N], of_value[N];
    load_run(x, pre + gate, room, whole);
    if (gated) load_run(y, pre + gate + shape.hidden, room, whole);
    for (int n = 0; n < N; ++n) {
      const Sum value = gated ? y[n] : Sum{1};
      result[n] = activated(shape.activation, x[n], value);
      of_gate[n] = from[n] * slope(shape.activation, x[n], value);
      of_value[n] = from[n] * x[n] * logistic(x[n]);
    }
    store_run(act + r * shape.hidden + h, result, room, whole);
    store_run(grad_pre + gate, of_gate, room, whole);
    if (gated) store_run(grad_pre + gate + shape.hidden, of_value, room, whole);
  });
}

// out[e] = left^T right over the rows of group e = z; left is [rows, height], right [rows, width].
template <typename T>
__global__ void __launch_bounds__(Tile<T>::kThreads, 2)
    ffn_weights_kernel(int64_t height, int64_t width, const T* __restrict__ left,
                       const T* __restrict__ right, const int64_t* __restrict__ offsets,
                       T* __restrict__ out) {
  constexpr int kSide = Tile<T>::kSide;
  __shared__ TileMemory<T> memory;
  const int64_t first = offsets[blockIdx.z], depth = offsets[blockIdx.z + 1] - first;
  const int64_t m0 = int64_t{blockIdx.x} * kSide, n0 = int64_t{blockIdx.y} * kSide;
  const int64_t rows = height - m0 < kSide ? height - m0 : kSide;
  const int64_t columns = width - n0 < kSide ? width - n0 : kSide;
  Tile<T> product;
  product.template multiply<false, false>(
      depth, Operand<T>{left + first * height + m0, height, rows},
      Operand<T>{right + first * width + n0, width, columns}, memory);
  T* to = out + int64_t{blockIdx.z} * height * width;
  const bool whole = whole_runs(out, out, width);
  each_run<T>(product, rows, memory, [&](int row, int column, const typename Tile<T>::Sum* sums) {
    if (row >= rows || column >= columns) return;
    store_run(to + (m0 + row) * width + n0 + column, sums, columns - column, whole);
  });
}

}  // namespace heterps
