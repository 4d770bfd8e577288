// What the programs here share: arrays that end where their memory does, and a check that ends
// them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "heterps/half.h"

namespace heterps {

inline std::mt19937_64 chance(7);

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Numbers of the element type; an empty array has no memory.
template <typename T>
std::vector<T> random(int64_t n, double scale = 1.0) {
  std::normal_distribution<double> normal(0.0, scale);
  std::vector<T> values;
  values.reserve(n);  // to the element: what lies behind is poisoned
  for (int64_t i = 0; i < n; ++i)
    values.push_back(static_cast<T>(static_cast<Sum<T>>(normal(chance))));
  return values;
}

inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

}  // namespace heterps
