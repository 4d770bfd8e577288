// Sixteen-bit floats and scaled bytes, for rows at rest and on the wire.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bindings/platform.h"
#include "table/hash.h"

namespace heterps::ps {

enum class Dtype : uint8_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3 };

inline size_t SizeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return 4;
    case Dtype::kFloat16:
    case Dtype::kBfloat16:
      return 2;
    case Dtype::kInt8:
      return 1;
  }
  return 4;
}

// `noise` decides the rounding: half of the last bit rounds to nearest, random bits round
// stochastically.
inline uint16_t ToBfloat16(float value, uint32_t noise) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  const uint32_t rounded = (bits + noise) >> 16;
  // As below: a row must stay finite.
  return static_cast<uint16_t>((rounded & 0x7fffu) < 0x7f80u ? rounded
                                                             : (rounded & 0x8000u) | 0x7f7fu);
}
inline uint16_t ToBfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return ToBfloat16(value, 0x7fffu + ((bits >> 16) & 1u));  // ties to even
}
inline float FromBfloat16(uint16_t half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

// Beyond 65504 it saturates: a row must stay finite.
inline uint16_t ToFloat16(float value, uint32_t noise, bool nearest) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    float whole = nearest ? std::nearbyint(scaled)
                          : std::floor(scaled + static_cast<float>(noise & 0x1fffu) * 0x1p-13f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(whole));
  }
  magnitude += nearest ? 0xfffu + ((magnitude >> 13) & 1u) : noise & 0x1fffu;
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7bffu);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}
inline uint16_t ToFloat16(float value) { return ToFloat16(value, 0, true); }
inline float FromFloat16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // 2^112 moves the exponent from a bias of 15 to one of 127, subnormals included.
  float value = std::bit_cast<float>(shifted) * 0x1p112f;
  if ((half & 0x7c00u) == 0x7c00u) value = std::bit_cast<float>(shifted | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) |
                              (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// `n` floats of any alignment. A row of bytes carries its scale, a float, in front.
void Encode(Dtype dtype, const void* from, size_t n, void* to);
void EncodeStochastic(Dtype dtype, const void* from, size_t n, void* to, uint64_t seed);
void Decode(Dtype dtype, const void* from, size_t n, void* to);

// Bytes that `n` encoded values take.
inline size_t EncodedBytes(Dtype dtype, size_t n) {
  return dtype == Dtype::kInt8 ? sizeof(float) + n : n * SizeOf(dtype);
}

}  // namespace heterps::ps
