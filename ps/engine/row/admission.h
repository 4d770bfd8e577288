// When a key that is pushed to gets a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "table/pool.h"

namespace heterps::ps {

struct Score {
  float non_click = 0;
  float click = 0;
  float decay = 1;

  bool used() const { return non_click != 0 || click != 0; }
  float of(const Usage& usage) const {
    return non_click * (usage.shows - usage.clicks) + click * usage.clicks;
  }
};

struct Admission {
  enum class Kind : uint32_t { kAll, kCount, kBloom, kProbability, kScore };
  Kind kind = Kind::kAll;
  double threshold = 0;
  uint64_t capacity = 0;      // bloom
  double false_positive = 0;  // bloom
  bool reads_zeros = false;

  // Keys are counted one by one in rows without weights.
  bool exact() const { return kind == Kind::kCount || kind == Kind::kScore; }
};

// A counting Bloom filter with conservative update: a count is never too low, and too high for
// at most the given share of keys. Not thread-safe.
class Bloom {
 public:
  Bloom() = default;
  Bloom(uint64_t capacity, double false_positive);

  // Adds `count` and returns the key's count then, up to 255.
  uint32_t Add(uint64_t hash, uint32_t count);

  std::span<const uint8_t> counters() const { return {counters_.get(), size_}; }
  // Takes the higher of both counts. False, and nothing done, when the sizes differ.
  bool Merge(const void* counters, size_t size);

 private:
  struct Free {
    void operator()(uint8_t* counters) const { std::free(counters); }
  };
  // From calloc: pages of zeros take no memory before a key is counted there.
  std::unique_ptr<uint8_t[], Free> counters_;
  size_t size_ = 0;
  uint32_t probes_ = 0;
};

}  // namespace heterps::ps
