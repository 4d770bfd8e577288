// How fast the uses of rows are forgotten, found out while a table is used: by two sub-tables that
// forget fast, as is best where what is used changes, two that forget slowly, as is best where it
// does not, and which of them had to bring fewer rows from disk. The others do as they do.
//
// After set dueling (Qureshi et al., Adaptive insertion policies for high performance caching, ISCA
// 2007).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace heterps::ps {

// Thread-safe.
class Duel {
 public:
  // Uses that are counted of a row of a sub-table, on average, when all counts are halved.
  size_t Most(size_t subtable) const {
    if (subtable % kApart == kFast) return kFew;
    if (subtable % kApart == kSlow) return kMany;
    return fast_.load(std::memory_order_relaxed) ? kFew : kMany;
  }

  // A sub-table brought a row from disk.
  void Missed(size_t subtable) {
    const size_t role = subtable % kApart;
    if (role != kFast && role != kSlow) return;
    const int step = role == kFast ? -1 : 1;  // two that add at once may lose one: no matter
    const int ahead = std::clamp(ahead_.load(std::memory_order_relaxed) + step, -kSure, kSure);
    ahead_.store(ahead, std::memory_order_relaxed);
    // What was counted for long is lost once it is forgotten, and so is not for a chance few.
    if (ahead >= kSure / 2) fast_.store(true, std::memory_order_relaxed);
    if (ahead <= -kSure / 2) fast_.store(false, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kApart = 32, kFast = 0, kSlow = 16;
  static constexpr size_t kFew = 3, kMany = 24;
  static constexpr int kSure = 256;

  std::atomic<int> ahead_{0};  // rows that slow ones brought more than fast ones, of late
  std::atomic<bool> fast_{false};
};

}  // namespace heterps::ps
