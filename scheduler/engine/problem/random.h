// Random numbers that are the same everywhere.
#pragma once

#include <cstdint>

namespace heterps::scheduler {

// SplitMix64: the next number above 0 and below 1.
inline double Uniform(uint64_t* state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ULL);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  return (static_cast<double>(z >> 11) + 0.5) * 0x1.0p-53;
}

}  // namespace heterps::scheduler
