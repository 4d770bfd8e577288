// Takes the place of heterps/ptx.cuh, which says what these do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "device.h"

namespace heterps {

inline void store_16_bytes(void* to, const void* from, EMULATE_SITE) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) {
    emulate::fail("a store that is not aligned to 16 bytes", EMULATE_HERE);
  }
  std::memcpy(to, from, 16);
}

// The copy is made at once or when it is waited for, and till then there is something else.
template <typename T>
void copy_16_bytes(T* shared, const T* from, bool inside, EMULATE_SITE) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    emulate::fail("a copy that is not aligned to 16 bytes", EMULATE_HERE);
  }
  const emulate::Copy copy{shared, inside ? from : nullptr};
  if (emulate::copies_later(copy)) {
    std::memset(static_cast<void*>(shared), 0xcd, 16);
  } else {
    copy.make();
  }
}
inline void end_group_of_copies() { emulate::end_group_of_copies(); }
template <int kGroups>
void await_copies() {
  emulate::await_copies(kGroups, [](const emulate::Copy& copy) { copy.make(); });
}

template <bool kTransposed, typename T>
void load_matrices(uint32_t (&to)[4], const T* row, EMULATE_SITE) {
  static_assert(sizeof(T) == 2);
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    emulate::fail("a row of a matrix that is not aligned to 16 bytes", EMULATE_HERE);
  }
  struct Call {
    const T* row;
    const T* rows[emulate::kLanes];
  } mine{row, {}};
  emulate::meet_warp(
      0xffffffffu, &mine,
      [](void* const* lanes, emulate::Site) {
        for (int l = 0; l < emulate::kLanes; ++l) {
          for (int from = 0; from < emulate::kLanes; ++from) {
            static_cast<Call*>(lanes[l])->rows[from] = static_cast<Call*>(lanes[from])->row;
          }
        }
      },
      EMULATE_HERE);
  const int g = static_cast<int>(emulate::lane()) / 4,
            t = 2 * (static_cast<int>(emulate::lane()) % 4);
  for (int matrix = 0; matrix < 4; ++matrix) {
    T pair[2];
    for (int i = 0; i < 2; ++i) {
      pair[i] = kTransposed ? mine.rows[8 * matrix + t + i][g] : mine.rows[8 * matrix + g][t + i];
    }
    std::memcpy(&to[matrix], pair, 4);
  }
  __syncwarp(0xffffffffu, file, line);  // nobody goes on before all have read
}

template <typename T>
void multiply_add(float (&sums)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1,
                  EMULATE_SITE) {
  struct Call {
    float* sums;
    const uint32_t* left;
    uint32_t right[2];
  } mine{sums, left, {right0, right1}};
  emulate::meet_warp(
      0xffffffffu, &mine,
      [](void* const* lanes, emulate::Site) {
        float a[16][16], b[16][8];
        const auto number = [](uint32_t pair, int i) {
          const auto bits = static_cast<uint16_t>(pair >> 16 * i);
          T value;
          std::memcpy(static_cast<void*>(&value), &bits, 2);
          return static_cast<float>(value);
        };
        for (int l = 0; l < emulate::kLanes; ++l) {
          const auto* call = static_cast<Call*>(lanes[l]);
          const int g = l / 4, t = 2 * (l % 4);
          for (int i = 0; i < 2; ++i) {
            for (int part = 0; part < 4; ++part) {
              a[g + part % 2 * 8][t + i + part / 2 * 8] = number(call->left[part], i);
            }
            for (int part = 0; part < 2; ++part) {
              b[t + i + 8 * part][g] = number(call->right[part], i);
            }
          }
        }
        for (int l = 0; l < emulate::kLanes; ++l) {
          const auto* call = static_cast<Call*>(lanes[l]);
          for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
            for (int k = 0; k < 16; ++k) call->sums[i] += a[row][k] * b[k][column];
          }
        }
      },
      EMULATE_HERE);
}

}  // namespace heterps
