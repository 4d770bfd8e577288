#include "row/admission.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "table/hash.h"

namespace heterps::ps {

Bloom::Bloom(uint64_t capacity, double false_positive) {
  constexpr double kLn2 = 0.6931471805599453;
  const double keys = static_cast<double>(std::max<uint64_t>(capacity, 1));
  const double per_key = -std::log(false_positive) / (kLn2 * kLn2);
  size_ = static_cast<size_t>(std::ceil(keys * per_key)) + 64;
  counters_.reset(static_cast<uint8_t*>(std::calloc(size_, 1)));
  if (!counters_) throw std::bad_alloc();
  probes_ = static_cast<uint32_t>(std::clamp(std::lround(per_key * kLn2), 1L, 16L));
}

uint32_t Bloom::Add(uint64_t hash, uint32_t count) {
  const uint64_t step = Mix(hash) | 1;  // double hashing (Kirsch and Mitzenmacher)
  uint32_t lowest = 255;
  for (uint32_t i = 0; i < probes_; ++i) {
    lowest = std::min<uint32_t>(lowest, counters_[(hash + i * step) % size_]);
  }
  const uint32_t raised = std::min<uint32_t>(255, lowest + std::min<uint32_t>(count, 255));
  for (uint32_t i = 0; i < probes_; ++i) {
    uint8_t& counter = counters_[(hash + i * step) % size_];
    counter = std::max(counter, static_cast<uint8_t>(raised));
  }
  return raised;
}

bool Bloom::Merge(const void* counters, size_t size) {
  if (size != size_) return false;
  const auto* other = static_cast<const uint8_t*>(counters);
  for (size_t i = 0; i < size; ++i) {
    if (other[i] > counters_[i]) counters_[i] = other[i];
  }
  return true;
}

}  // namespace heterps::ps
