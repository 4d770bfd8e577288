// The 16-bit floating-point types of the CPU twins: storage only, arithmetic is in float.
#pragma once

#include <cstdint>
#include <cstring>

namespace heterps {

// What float16 and bfloat16 add up in; the other types in their own.
template <typename T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <typename T>
using Sum = typename SumOf<T>::type;

namespace bits {

// Without branches, so that loops over rows become vector instructions.
inline float to_float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline uint32_t from_float(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

}  // namespace bits

struct BFloat16 {
  uint16_t word;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t w = bits::from_float(value);
    const uint32_t nearest_even = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    word = static_cast<uint16_t>(value != value ? 0x7fc0u : nearest_even);
  }
  explicit operator float() const { return bits::to_float(uint32_t{word} << 16); }
};

struct Float16 {
  uint16_t word;

  Float16() = default;
  // Rounds to nearest even by letting float addition do it, at the bit where float16 ends.
  explicit Float16(float value) {
    const uint32_t w = bits::from_float(value);
    const uint32_t magnitude = w & 0x7fffffffu;
    float base = bits::to_float(magnitude) * 0x1.0p+112f * 0x1.0p-110f;
    const uint32_t exponent = (w << 1) & 0xff000000u;
    const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    base += bits::to_float((bias >> 1) + 0x07800000u);
    const uint32_t rounded = bits::from_float(base);
    const uint32_t number = ((rounded >> 13) & 0x7c00u) + (rounded & 0xfffu);
    word =
        static_cast<uint16_t>((w >> 16 & 0x8000u) | (magnitude > 0x7f800000u ? 0x7e00u : number));
  }
  explicit operator float() const {
    const uint32_t magnitude = uint32_t{word} & 0x7fffu;
    const uint32_t finite = bits::from_float(bits::to_float(magnitude << 13) * 0x1.0p+112f);
    const uint32_t value = magnitude >= 0x7c00u ? finite | 0x7f800000u : finite;
    return bits::to_float(value | (uint32_t{word} & 0x8000u) << 16);
  }
};

}  // namespace heterps
