// The value a row has before any gradient: a function of (seed, key) alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps::ps {

struct Initializer {
  enum class Kind { kZeros, kUniform, kNormal };
  Kind kind = Kind::kZeros;
  double scale = 0;  // half-width of the interval, or standard deviation
  uint64_t seed = 0;

  // Writes `dim` values to `out`, which may have any alignment.
  void Fill(uint64_t key, size_t dim, void* out) const;
};

}  // namespace heterps::ps
