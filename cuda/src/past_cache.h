// Vectors written past the cache: a line that is written as a whole need not be read before, nor
// push out what will be needed sooner.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace heterps {
namespace {

// `to` is aligned to the vector.
template <typename Vec>
inline void write_past_cache(void* to, Vec value) {
#ifdef __AVX512F__
  if constexpr (sizeof(Vec) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(to), __builtin_bit_cast(__m512i, value));
    return;
  }
#endif
#ifdef __AVX__
  if constexpr (sizeof(Vec) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), __builtin_bit_cast(__m256i, value));
    return;
  }
#endif
  std::memcpy(to, &value, sizeof value);
}

// Before other threads are told that all is written.
inline void finish_past_cache() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace heterps
