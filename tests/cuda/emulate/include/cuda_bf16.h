// bfloat16: the upper half of a float, rounded to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t word;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t below = bits & 0xffffu;
    word = static_cast<uint16_t>(bits >> 16);
    if (std::isnan(value)) {
      word = 0x7fff;
    } else if (below > 0x8000u || (below == 0x8000u && word % 2 == 1)) {
      ++word;
    }
  }
  explicit operator float() const {
    const uint32_t bits = uint32_t{word} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};
