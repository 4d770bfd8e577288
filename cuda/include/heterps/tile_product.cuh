// A tile of a matrix product by one block of threads: `Tile<T>` is one of 128 x 128 by tensor cores
// for float16 and bfloat16 (tile_tensor.cuh), of 64 x 64 by plain arithmetic for float and double
// (tile_plain.cuh). Both have
//
//   kSide, kThreads         of a tile, of its block
//   Memory                  what the block shares
//   multiply<kLeftDeep, kRightDeep>(depth, left, right, memory)
//                           sums = left[kSide, depth] right[depth, kSide], in the registers of the
//                           block's threads, all of which call, once
//   put(first, to)          writes those of 64 rows from `first` on
//
// Sums run in a fixed order.
#pragma once

#include "heterps/run.cuh"
#include "heterps/tile_plain.cuh"
#include "heterps/tile_tensor.cuh"

namespace heterps {

template <typename T>
struct TileOf {
  using type = TensorTile<T>;
};
template <>
struct TileOf<float> {
  using type = PlainTile<float>;
};
template <>
struct TileOf<double> {
  using type = PlainTile<double>;
};
template <typename T>
using Tile = typename TileOf<T>::type;
template <typename T>
using TileMemory = typename Tile<T>::Memory;

// Calls store(row, column, sums) for the runs of the first `rows` rows, spread over the threads of
// the block, all of which call: neighbours have neighbouring runs.
template <typename T, typename Store>
__device__ void each_run(const Tile<T>& tile, int64_t rows, TileMemory<T>& memory,
                         const Store& store) {
  constexpr int kAcross = Tile<T>::kSide / kRun<T>;
  for (int first = 0; first < rows && first < Tile<T>::kSide; first += 64) {
    __syncthreads();  // nobody reads what lies there
    tile.put(first, memory.sums);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 64 * kAcross; i += Tile<T>::kThreads) {
      const int row = i / kAcross, column = i % kAcross * kRun<T>;
      store(first + row, column, memory.sums + row * Tile<T>::kSumPitch + column);
    }
  }
}

// The same of a gated product (see Operand): store(row, column, gates, values).
template <typename T, typename Store>
__device__ void each_gated_run(const Tile<T>& tile, int64_t rows, TileMemory<T>& memory,
                               const Store& store) {
  constexpr int kAcross = Tile<T>::kSide / 2 / kRun<T>, kGateRun = Tile<T>::kGateRun;
  for (int first = 0; first < rows && first < Tile<T>::kSide; first += 64) {
    __syncthreads();
    tile.put(first, memory.sums);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 64 * kAcross; i += Tile<T>::kThreads) {
      const int row = i / kAcross, column = i % kAcross * kRun<T>;
      const auto* gates = memory.sums + row * Tile<T>::kSumPitch +
                          column / kGateRun * 2 * kGateRun + column % kGateRun;
      store(first + row, column, gates, gates + kGateRun);
    }
  }
}

}  // namespace heterps
