// Instructions that CUDA C++ has no names for, from sm_80 on. What they do on a CPU stands in
// tests/cuda/emulate/include/ptx.h, which takes this file's place there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace heterps {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Stores 16 bytes of registers at once, aligned. From C++ the compiler often makes four stores.
__device__ __forceinline__ void store_16_bytes(void* to, const void* from) {
  uint32_t words[4];
  memcpy(words, from, sizeof words);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Begins to copy 16 bytes, aligned, to shared memory; zeros, where not `inside`. They are there
// when the thread has waited, for the others of the block after a barrier besides.
template <typename T>
__device__ __forceinline__ void copy_16_bytes(T* shared, const T* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// Ends a group of the thread's copies, of none as well.
__device__ __forceinline__ void end_group_of_copies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until no more than the latest kGroups groups of this thread are under way.
template <int kGroups>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

// Four matrices of 8 x 8 from shared memory: lane l names row l % 8, 16 bytes, of matrix l / 8. It
// gets of each the elements 2 (l % 4) and the next one of row l / 4; kTransposed: of column l / 4.
template <bool kTransposed, typename T>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const T* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// sums[16, 8] += left[16, 16] right[16, 8] by a warp, of which lane l has, g being l / 4 and t
// 2 (l % 4): of left rows g and g + 8 of columns t, t + 1, then of columns t + 8, t + 9; of right
// rows t, t + 1, then t + 8, t + 9 of column g; of sums columns t, t + 1 of row g, then of row g
// + 8.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&left)[4],
                                             uint32_t right0, uint32_t right1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&sums)[4], const uint32_t (&left)[4],
                                                     uint32_t right0, uint32_t right1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&sums)[4],
                                                            const uint32_t (&left)[4],
                                                            uint32_t right0, uint32_t right1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

}  // namespace heterps
