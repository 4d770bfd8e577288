// Parts of a step made one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace heterps::ps {

// Rows of some keys, of any alignment.
struct KeyedRows {
  const char* keys;
  size_t key_bytes;  // 4 or 8
  const char* rows;  // float32
  size_t count;
};

struct Merged {
  std::unique_ptr<uint64_t[]> keys;  // distinct, in order of first occurrence
  std::unique_ptr<float[]> sums;     // a row each
  size_t count = 0;
};

// Sums the rows of equal keys, in the order of the parts; nothing is clamped.
void Merge(const std::vector<KeyedRows>& parts, size_t dim, Merged* out);

// Not finite where one of the values is not. Added in an order that no number of threads changes.
double SquaredNorm(const void* values, size_t n);

void Scale(const void* values, size_t n, double scale, float* out);

}  // namespace heterps::ps
