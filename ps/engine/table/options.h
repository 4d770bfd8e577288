// What a table is told at its creation.
#pragma once

#include <cstdint>
#include <string>

#include "row/admission.h"
#include "row/layout.h"

namespace heterps::ps {

// Zero: the rule is off.
struct Eviction {
  uint64_t ttl_s = 0;
  uint64_t ttl_steps = 0;
  double min_norm = 0;
  double min_score = 0;
  uint64_t max_rows = 0;
  bool by_count = true;  // max_rows keeps the most used; else the last used

  bool used() const { return ttl_s || ttl_steps || min_norm > 0 || min_score > 0 || max_rows; }
};

struct Options {
  Layout layout;
  Admission admission;
  Score score;
  Eviction eviction;
  uint64_t memory_bytes = 0;  // beyond it rows go to disk; 0: never
  std::string directory;      // for the rows on disk

  bool tiered() const { return memory_bytes > 0; }
  // Whether rows know how they were used.
  bool usage() const {
    return eviction.used() || admission.exact() || score.used() || layout.has_lazy();
  }
  float ScoreOf(const Usage& usage) const {
    return score.used() ? score.of(usage) : static_cast<float>(usage.count);
  }
};

}  // namespace heterps::ps
