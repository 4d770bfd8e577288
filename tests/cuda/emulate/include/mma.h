// wmma of 16 x 16 x 16. Which lane has which element the language leaves open, so here it is a
// shuffled order; the sum over k runs upward in float, which tensor cores do not promise.
#pragma once

#include "device.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
enum layout_t { mem_row_major };

constexpr int kSide = 16;
constexpr int kElements = kSide * kSide / emulate::kLanes;

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M == kSide && N == kSide && K == kSide);
  static constexpr int num_elements = kElements;
  T x[kElements];
};

// Element i of a lane as an index into the matrix: 77 is odd, so that each stands once.
inline int place_of(int lane, int i) { return (77 * (lane * kElements + i) + 13) % 256; }

// All lanes call with the same memory, of the alignment that the language asks for.
template <typename T>
void check_memory(const T* memory, unsigned pitch, emulate::Site site) {
  struct Call {
    const T* memory;
    unsigned pitch;
  } mine{memory, pitch};
  emulate::meet_warp(
      0xffffffffu, &mine,
      [](void* const* lanes, emulate::Site at) {
        const auto* first = static_cast<Call*>(lanes[0]);
        for (int l = 0; l < emulate::kLanes; ++l) {
          const auto* call = static_cast<Call*>(lanes[l]);
          if (call->memory != first->memory || call->pitch != first->pitch) {
            emulate::fail("lanes of a warp name different memory", at);
          }
        }
      },
      site);
  if (reinterpret_cast<uintptr_t>(memory) % 32 != 0 || pitch * sizeof(T) % 16 != 0) {
    emulate::fail("expected memory at a multiple of 32 bytes and rows of a multiple of 16", site);
  }
}

template <typename Fragment, typename T>
void fill_fragment(Fragment& to, T value) {
  for (auto& element : to.x) element = value;
}

template <typename Use, typename T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, row_major>& to, const T* memory, unsigned pitch,
                      EMULATE_SITE) {
  check_memory(memory, pitch, EMULATE_HERE);
  for (int i = 0; i < kElements; ++i) {
    const int place = place_of(static_cast<int>(emulate::lane()), i);
    to.x[i] = memory[place / kSide * pitch + place % kSide];
  }
}

inline void store_matrix_sync(float* memory, const fragment<accumulator, 16, 16, 16, float>& from,
                              unsigned pitch, layout_t, EMULATE_SITE) {
  check_memory(memory, pitch, EMULATE_HERE);
  for (int i = 0; i < kElements; ++i) {
    const int place = place_of(static_cast<int>(emulate::lane()), i);
    memory[place / kSide * pitch + place % kSide] = from.x[i];
  }
}

template <typename T>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, row_major>& a,
              const fragment<matrix_b, 16, 16, 16, T, row_major>& b,
              const fragment<accumulator, 16, 16, 16, float>& c, EMULATE_SITE) {
  struct Call {
    float* d;
    const T *a, *b;
    const float* c;
  } mine{d.x, a.x, b.x, c.x};
  emulate::meet_warp(
      0xffffffffu, &mine,
      [](void* const* lanes, emulate::Site) {
        float left[256], right[256];
        for (int l = 0; l < emulate::kLanes; ++l) {
          const auto* call = static_cast<Call*>(lanes[l]);
          for (int i = 0; i < kElements; ++i) {
            left[place_of(l, i)] = static_cast<float>(call->a[i]);
            right[place_of(l, i)] = static_cast<float>(call->b[i]);
          }
        }
        for (int l = 0; l < emulate::kLanes; ++l) {
          const auto* call = static_cast<Call*>(lanes[l]);
          for (int i = 0; i < kElements; ++i) {
            const int place = place_of(l, i), row = place / kSide, column = place % kSide;
            float sum = call->c[i];
            for (int k = 0; k < kSide; ++k) {
              sum += left[row * kSide + k] * right[k * kSide + column];
            }
            call->d[i] = sum;
          }
        }
      },
      EMULATE_HERE);
}

}  // namespace nvcuda::wmma
