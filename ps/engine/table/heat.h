// How often a row in memory is used, for whoever chooses what goes to disk (Clock).
//
// The uses for which a row was brought into memory say nothing of later ones: they are expected,
// and do not count. Else rows that are used once would stay as long as those that are used often.
#pragma once

#include <cstdint>

namespace heterps::ps {

class Heat {
 public:
  // Of a row for which so many uses are under way, at most 3.
  static uint8_t Expecting(uint8_t uses) { return static_cast<uint8_t>(uses << kBits); }

  static void Use(uint8_t& heat) {
    if (heat > kMost) {
      heat = static_cast<uint8_t>(heat - (1u << kBits));
    } else if (heat < kMost) {
      ++heat;
    }
  }

  // Whether the row may leave; if not it has cooled, and may after `kPasses` such looks.
  static bool Cold(uint8_t& heat) {
    if (heat == 0) return true;
    heat = heat > kMost ? heat & kMost : static_cast<uint8_t>(heat >> 1);
    return false;
  }

  static constexpr unsigned kPasses = 8;

 private:
  static constexpr unsigned kBits = 6;
  static constexpr uint8_t kMost = (1u << kBits) - 1;
};

}  // namespace heterps::ps
