// How often a row is used, for whoever chooses what goes to disk: the rows that are used least.
//
// Rows on disk keep what they had, so that one of which two uses lie far apart is told from one
// that is used once. Counts are halved now and then, so that they follow what changes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace heterps::ps {

class Heat {
 public:
  static constexpr unsigned kMost = 63;  // uses that are counted
  static constexpr uint8_t kNone = 255;  // of a slot without a row

  // Of a row that is made, or comes from disk, for so many uses, at most 2. Those count as a pull
  // and a push from now on, whenever they are made.
  static uint8_t Arriving(unsigned before, unsigned uses) {
    return static_cast<uint8_t>(uses << kBits | std::min(before + 2, kMost));
  }

  // Of a row in memory that a step to come will pull and push: it is not to leave before.
  static void Expect(uint8_t& heat) { heat = Arriving(Count(heat), 2); }

  static void Use(uint8_t& heat) {
    if (heat > kMost) {
      heat = static_cast<uint8_t>(heat - (1u << kBits));
    } else if (heat < kMost) {
      ++heat;
    }
  }

  static unsigned Count(uint8_t heat) { return heat & kMost; }

  // Rows of low ranks leave first: of those whose uses are still to come, none before all others.
  static constexpr unsigned kRanks = 2 * (kMost + 1);
  static unsigned Rank(uint8_t heat) { return Count(heat) + (heat > kMost ? kMost + 1 : 0); }

  // Others have left: uses that are still to come may not come at all.
  static void Wait(uint8_t& heat) {
    if (heat > kMost) heat = static_cast<uint8_t>(heat - (1u << kBits));
  }

  static uint8_t Halved(uint8_t heat) {
    return static_cast<uint8_t>((heat & ~kMost) | (heat & kMost) >> 1);
  }

 private:
  static constexpr unsigned kBits = 6;
};

}  // namespace heterps::ps
