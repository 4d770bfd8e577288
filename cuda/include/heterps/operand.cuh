// What a tile of a product reads of a matrix.
#pragma once

#include <cstdint>

namespace heterps {

// Lines along a side of the tile: rows of the left matrix, columns of the right one. Deep: a line
// lies together in memory, `pitch` elements before the next. Else what lies together is an element
// of each line, and lines have `pitch` elements between theirs. From `extent` on lines are zero.
//
// Gated, which is never deep: of the tile's lines each kGateRun are followed by as many of the same
// numbers that lie `gated` elements further on. So one tile has gates and values, `extent` of each.
template <typename T>
struct Operand {
  const T* data;
  int64_t pitch;
  int64_t extent;
  int64_t gated = 0;
};

}  // namespace heterps
