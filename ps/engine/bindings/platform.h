// What differs between compilers and CPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Compiles a function twice, once for AVX2, and picks at load time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && \
    !defined(__SANITIZE_THREAD__) && !defined(HETERPS_PORTABLE)
#define HETERPS_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define HETERPS_CLONES
#endif

namespace heterps::ps {

// A float32 at any byte address: payloads follow a message head of any length.
typedef float UnalignedFloat __attribute__((aligned(1), may_alias));

inline uint64_t LoadKey(const void* keys, size_t i) {
  uint64_t key;
  std::memcpy(&key, static_cast<const char*>(keys) + 8 * i, 8);
  return key;
}

// For rows: tens to hundreds of bytes, where a call of memcpy costs as much as the copying.
inline void CopyRow(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<char*>(to);
  auto* in = static_cast<const char*>(from);
  for (; bytes >= 64; bytes -= 64, out += 64, in += 64) std::memcpy(out, in, 64);
  if (bytes) std::memcpy(out, in, bytes);
}

inline void Prefetch(const void* address) { __builtin_prefetch(address); }
// Of what is used some hundred lines later: not into the smallest cache, which has room for fewer.
inline void PrefetchFar(const void* address) { __builtin_prefetch(address, 0, 2); }
inline void PrefetchToWrite(void* address) { __builtin_prefetch(address, 1); }

}  // namespace heterps::ps
