// A 64 x 64 tile of a matrix product, by one block of threads, into shared memory.
//
// float16 and bfloat16 go through tensor cores (wmma, from sm_80 on) and add up in float; float and
// double through plain multiply-adds. Operands of any size and of two layouts: what lies beyond
// their bounds counts as zero. Sums run in a fixed order.
#pragma once

#include <mma.h>

#include <cstdint>

namespace heterps {

constexpr int kTileSide = 64;
constexpr int kTileThreads = 128;  // 4 warps, each with a quarter of 32 x 32

template <typename T>
struct TileTypes {  // the 16-bit types
  using Sum = float;
  static constexpr int kDepth = 32;
  static constexpr int kLeftPitch = kDepth + 8;      // 5 KiB of shared memory
  static constexpr int kRightPitch = kTileSide + 8;  // 4.5 KiB
  static constexpr int kSumPitch = kTileSide + 4;    // 17 KiB
  static constexpr bool kTensorCores = true;
};
template <>
struct TileTypes<float> {
  using Sum = float;
  static constexpr int kDepth = 16;
  static constexpr int kLeftPitch = kDepth + 1;      // 4.3 KiB
  static constexpr int kRightPitch = kTileSide + 1;  // 4.1 KiB
  static constexpr int kSumPitch = kTileSide;        // 16 KiB
  static constexpr bool kTensorCores = false;
};
template <>
struct TileTypes<double> {
  using Sum = double;
  static constexpr int kDepth = 8;
  static constexpr int kLeftPitch = kDepth + 1;      // 4.5 KiB
  static constexpr int kRightPitch = kTileSide + 1;  // 4.1 KiB
  static constexpr int kSumPitch = kTileSide;        // 32 KiB
  static constexpr bool kTensorCores = false;
};

template <typename T>
struct TileMemory {
  using Types = TileTypes<T>;
  alignas(32) T left[kTileSide * Types::kLeftPitch];
  alignas(32) T right[Types::kDepth * Types::kRightPitch];
  alignas(32) typename Types::Sum sums[kTileSide * Types::kSumPitch];

  __device__ typename Types::Sum at(int row, int column) const {
    return sums[row * Types::kSumPitch + column];
  }
};

// Element (i, j) lies at data[i * row + j * column]; outside rows and columns it is zero.
template <typename T>
struct Operand {
  const T* data;
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;

  __device__ T at(int64_t i, int64_t j) const {
    return i < rows && j < columns ? data[i * row + j * column] : static_cast<T>(0.0f);
  }
};

// Tensor cores: each warp adds left[32, kDepth] right[kDepth, 32] to its 2 x 2 fragments.
template <typename T>
struct WarpSums {
  template <typename Use>
  using Piece = nvcuda::wmma::fragment<Use, 16, 16, 16, T, nvcuda::wmma::row_major>;
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sums[2][2];

  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 64 * 32; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 32 % 2 * 32; }

  __device__ void clear() {
    for (auto& row : sums) {
      for (auto& piece : row) nvcuda::wmma::fill_fragment(piece, 0.0f);
    }
  }
  __device__ void add(const TileMemory<T>& memory) {
    using Types = TileTypes<T>;
    for (int k = 0; k < Types::kDepth; k += 16) {
      Piece<nvcuda::wmma::matrix_a> left[2];
      Piece<nvcuda::wmma::matrix_b> right[2];
      for (int i = 0; i < 2; ++i) {
        const int row = first_row() + 16 * i, column = first_column() + 16 * i;
        nvcuda::wmma::load_matrix_sync(left[i], memory.left + row * Types::kLeftPitch + k,
                                       Types::kLeftPitch);
        nvcuda::wmma::load_matrix_sync(right[i], memory.right + k * Types::kRightPitch + column,
                                       Types::kRightPitch);
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          nvcuda::wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
        }
      }
    }
  }
  __device__ void store(TileMemory<T>& memory) {
    using Types = TileTypes<T>;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to =
            memory.sums + (first_row() + 16 * i) * Types::kSumPitch + first_column() + 16 * j;
        nvcuda::wmma::store_matrix_sync(to, sums[i][j], Types::kSumPitch,
                                        nvcuda::wmma::mem_row_major);
      }
    }
  }
};

// Plain arithmetic: each thread has the rows i + 8 r and the columns j + 16 c, r < 8, c < 4.
template <typename T>
struct ThreadSums {
  T sums[8][4];

  __device__ void clear() {
    for (auto& row : sums) {
      for (T& sum : row) sum = 0;
    }
  }
  __device__ void add(const TileMemory<T>& memory) {
    using Types = TileTypes<T>;
    const int i = threadIdx.x / 16, j = threadIdx.x % 16;
    for (int k = 0; k < Types::kDepth; ++k) {
      T right[4];
      for (int c = 0; c < 4; ++c) right[c] = memory.right[k * Types::kRightPitch + j + 16 * c];
      for (int r = 0; r < 8; ++r) {
        const T left = memory.left[(i + 8 * r) * Types::kLeftPitch + k];
        for (int c = 0; c < 4; ++c) sums[r][c] += left * right[c];
      }
    }
  }
  __device__ void store(TileMemory<T>& memory) {
    const int i = threadIdx.x / 16, j = threadIdx.x % 16;
    for (int r = 0; r < 8; ++r) {
      for (int c = 0; c < 4; ++c) {
        memory.sums[(i + 8 * r) * TileTypes<T>::kSumPitch + j + 16 * c] = sums[r][c];
      }
    }
  }
};

template <typename T, bool kTensorCores = TileTypes<T>::kTensorCores>
struct SumsOf {
  using type = WarpSums<T>;
};
template <typename T>
struct SumsOf<T, false> {
  using type = ThreadSums<T>;
};

// memory.sums = left[64, depth] right[depth, 64]; every thread of the block calls, all may read
// when it returns. `left` and `right` begin at the tile's first row and column.
template <typename T>
__device__ void tile_product(int64_t depth, const Operand<T>& left, const Operand<T>& right,
                             TileMemory<T>& memory) {
  using Types = TileTypes<T>;
  typename SumsOf<T>::type sums;
  sums.clear();
  for (int64_t k = 0; k < depth; k += Types::kDepth) {
    __syncthreads();  // nobody reads the last parts any more
    // Neighbouring threads read neighbouring elements, whichever the layout.
    for (int i = threadIdx.x; i < kTileSide * Types::kDepth; i += kTileThreads) {
      const bool deep = left.column == 1;
      const int m = deep ? i / Types::kDepth : i % kTileSide;
      const int d = deep ? i % Types::kDepth : i / kTileSide;
      memory.left[m * Types::kLeftPitch + d] = left.at(m, k + d);
    }
    for (int i = threadIdx.x; i < kTileSide * Types::kDepth; i += kTileThreads) {
      const bool deep = right.row == 1;
      const int n = deep ? i / Types::kDepth : i % kTileSide;
      const int d = deep ? i % Types::kDepth : i / kTileSide;
      memory.right[d * Types::kRightPitch + n] = right.at(k + d, n);
    }
    __syncthreads();
    sums.add(memory);
  }
  __syncthreads();  // nobody reads earlier sums any more
  sums.store(memory);
  __syncthreads();
}

}  // namespace heterps
