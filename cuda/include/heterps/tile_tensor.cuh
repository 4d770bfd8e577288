// A tile of 128 x 128 by tensor cores: float16 or bfloat16, sums in float.
//
// Slabs of 32 of the depth come by copies that go on by themselves, two ahead of the one that is
// multiplied. Eight warps have 64 x 32 each, in pieces of 16 x 8. In shared memory the chunks of 16
// bytes of neighbouring lines are shuffled, so that eight that are read together lie in all banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "heterps/operand.cuh"
#include "heterps/ptx.cuh"

namespace heterps {

template <typename T>
struct TensorTile {
  static constexpr int kSide = 128, kThreads = 256, kGateRun = 16;
  static constexpr int kDepth = 32, kStages = 3, kChunk = 8;
  static constexpr int kSumPitch = kSide + 4;
  using Sum = float;

  union Memory {  // 48 KiB, what a block may have without asking
    struct {
      alignas(128) T left[kStages][kSide * kDepth];
      alignas(128) T right[kStages][kSide * kDepth];
    };
    float sums[64 * kSumPitch];
  };

  float sums[4][4][4];  // pieces of the warp, down and across

  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 128 * 64; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 32 % 4 * 32; }

  // Where chunk `part` of a line of the slab lies; else of an element of the depth.
  template <bool kDeep>
  __device__ static int place(int row, int part) {
    return kDeep ? row * kDepth + (part ^ (row / 2 % 4)) * kChunk
                 : row * kSide + (part ^ (row % 8)) * kChunk;
  }

  // This thread's share of an operand's slabs.
  template <bool kDeep>
  struct Loader {
    static constexpr int kShare = kSide * kDepth / kChunk / kThreads;
    const T* from[kShare];
    int to[kShare];
    int at[kShare];     // in the depth
    int lines[kShare];  // from the first of the chunk on, none where they lie behind the last
    int64_t step;
    bool aligned;

    __device__ Loader(const Operand<T>& operand, int64_t depth) {
      constexpr int kParts = (kDeep ? kDepth : kSide) / kChunk;
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        const int chunk = static_cast<int>(threadIdx.x) + n * kThreads;
        const int row = chunk / kParts, part = chunk % kParts;
        int line = kDeep ? row : part * kChunk;
        int64_t further = 0;
        if (!kDeep && operand.gated != 0) {
          further = line / kGateRun % 2 == 0 ? 0 : operand.gated;
          line = line / (2 * kGateRun) * kGateRun + line % kGateRun;
        }
        at[n] = kDeep ? part * kChunk : row;
        lines[n] = static_cast<int>(operand.extent) - line;
        from[n] = operand.data + further +
                  (kDeep ? line * operand.pitch + at[n] : at[n] * operand.pitch + line);
        to[n] = place<kDeep>(row, part);
      }
      step = kDeep ? kDepth : kDepth * operand.pitch;
      aligned = reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
                (operand.pitch | operand.gated | (kDeep ? depth : operand.extent)) % kChunk == 0;
    }

    // The next slab, of which `depth` elements are left.
    __device__ void load(T* memory, int64_t depth) {
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        const int deep = static_cast<int>(depth < kDepth ? depth : kDepth) - at[n];
        const int room = kDeep ? (lines[n] > 0 ? deep : 0) : (deep > 0 ? lines[n] : 0);
        if (aligned) {
          copy_16_bytes(memory + to[n], from[n], room > 0);
        } else {
          for (int i = 0; i < kChunk; ++i) {
            memory[to[n] + i] = i < room ? from[n][i] : static_cast<T>(0.0f);
          }
        }
        from[n] += step;
      }
    }
  };

  // Four matrices of 8 x 8: of lines from `line` and depth from k on, this lane naming a row of the
  // matrix that lies 8 lines * `lines_on` and 8 * `depth_on` of the depth further.
  template <bool kDeep>
  __device__ static void load_piece(uint32_t (&piece)[4], const T* memory, int line, int k,
                                    int lines_on, int depth_on) {
    const int i = static_cast<int>(threadIdx.x) % 8;
    const int row = kDeep ? line + 8 * lines_on + i : k + 8 * depth_on + i;
    const int part = kDeep ? k / kChunk + depth_on : line / kChunk + lines_on;
    load_matrices<!kDeep>(piece, memory + place<kDeep>(row, part));
  }

  template <bool kLeftDeep, bool kRightDeep>
  __device__ void add(const T* left, const T* right) {
    const int matrix = static_cast<int>(threadIdx.x) % 32 / 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t down[4][4], across[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_piece<kLeftDeep>(down[i], left, first_row() + 16 * i, k, matrix % 2, matrix / 2);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        load_piece<kRightDeep>(across[j], right, first_column() + 16 * j, k, matrix / 2,
                               matrix % 2);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_add<T>(sums[i][j], down[i], across[j / 2][j % 2 * 2],
                          across[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  template <bool kLeftDeep, bool kRightDeep>
  __device__ void multiply(int64_t depth, const Operand<T>& left, const Operand<T>& right,
                           Memory& memory) {
    for (auto& row : sums) {
      for (auto& piece : row) {
        for (float& sum : piece) sum = 0;
      }
    }
    Loader<kLeftDeep> load_left(left, depth);
    Loader<kRightDeep> load_right(right, depth);
    const int64_t column = right.gated != 0 ? first_column() / 2 : first_column();
    const bool idle = first_row() >= left.extent || column >= right.extent;  // the whole warp
    int64_t asked = 0;
    int filling = 0, reading = 0;
    const auto ask = [&] {
      if (asked < depth) {
        load_left.load(memory.left[filling], depth - asked);
        load_right.load(memory.right[filling], depth - asked);
      }
      end_group_of_copies();
      asked += kDepth;
      filling = filling + 1 == kStages ? 0 : filling + 1;
    };
    for (int stage = 1; stage < kStages; ++stage) ask();
    for (int64_t k = 0; k < depth; k += kDepth) {
      await_copies<kStages - 2>();
      __syncthreads();  // all have their part of this slab, and have read the one before
      ask();
      if (!idle) add<kLeftDeep, kRightDeep>(memory.left[reading], memory.right[reading]);
      reading = reading + 1 == kStages ? 0 : reading + 1;
    }
  }

  // The sums of 64 rows from `first` on; those of other rows are other warps'.
  __device__ void put(int first, float* to) const {
    if (first_row() != first) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* at = to + (16 * i + lane / 4) * kSumPitch + first_column() + 8 * j + lane % 4 * 2;
        at[0] = sums[i][j][0], at[1] = sums[i][j][1];
        at += 8 * kSumPitch;
        at[0] = sums[i][j][2], at[1] = sums[i][j][3];
      }
    }
  }
};

}  // namespace heterps
