// A tile of 64 x 64 by plain multiply-adds: float or double.
#pragma once

#include <cstdint>

#include "heterps/operand.cuh"

namespace heterps {

template <typename T>
struct PlainTile {
  static constexpr int kSide = 64, kThreads = 128, kGateRun = 32;
  static constexpr int kDepth = sizeof(T) == 4 ? 16 : 8;
  static constexpr int kPitch = kSide + 1, kSumPitch = kSide;
  using Sum = T;

  union Memory {  // 16 or 32 KiB
    struct {
      T left[kDepth * kPitch];
      T right[kDepth * kPitch];
    };
    alignas(16) T sums[kSide * kSumPitch];
  };

  T sums[8][4];  // the rows i + 8 r and the columns j + 16 c

  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 16; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) % 16; }

  // Neighbouring threads read neighbouring elements, whichever the layout.
  template <bool kDeep>
  __device__ static void load(T* memory, const Operand<T>& operand, int64_t k, int64_t depth) {
    for (int i = threadIdx.x; i < kSide * kDepth; i += kThreads) {
      const int n = kDeep ? i / kDepth : i % kSide, d = kDeep ? i % kDepth : i / kSide;
      int line = n;
      int64_t further = 0;
      if (!kDeep && operand.gated != 0) {
        further = n < kGateRun ? 0 : operand.gated;
        line = n % kGateRun;
      }
      const bool inside = line < operand.extent && k + d < depth;
      const int64_t at = kDeep ? line * operand.pitch + k + d : (k + d) * operand.pitch + line;
      memory[d * kPitch + n] = inside ? operand.data[at + further] : T{0};
    }
  }

  template <bool kLeftDeep, bool kRightDeep>
  __device__ void multiply(int64_t depth, const Operand<T>& left, const Operand<T>& right,
                           Memory& memory) {
    for (auto& row : sums) {
      for (T& sum : row) sum = 0;
    }
    const int i = first_row(), j = first_column();
    for (int64_t at = 0; at < depth; at += kDepth) {
      __syncthreads();  // nobody reads the last parts any more
      load<kLeftDeep>(memory.left, left, at, depth);
      load<kRightDeep>(memory.right, right, at, depth);
      __syncthreads();
      for (int k = 0; k < kDepth; ++k) {
        T across[4];
        for (int c = 0; c < 4; ++c) across[c] = memory.right[k * kPitch + j + 16 * c];
        for (int r = 0; r < 8; ++r) {
          const T down = memory.left[k * kPitch + i + 8 * r];
          for (int c = 0; c < 4; ++c) sums[r][c] += down * across[c];
        }
      }
    }
  }

  // The sums, all of the tile's 64 rows.
  __device__ void put(int, T* to) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        to[(first_row() + 8 * r) * kSumPitch + first_column() + 16 * c] = sums[r][c];
      }
    }
  }
};

}  // namespace heterps
