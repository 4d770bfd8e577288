// Products of a linear layer for one core, in float32: one table of functions for each instruction
// set.
#pragma once

#include <cstdint>

namespace heterps {

// to[m, n], rows `width` apart, = a[m, depth] b[depth, n], and what is then done to it.
struct LinearProduct {
  int64_t m, n, depth;
  const float* a;
  int64_t a_row, a_column;
  const float* b;
  int64_t b_row, b_column;
  float* to;
  int64_t width;
  const float* bias = nullptr;  // [n], added
  bool relu = false;            // 0 where it is less
  // 0 where this is not above 0, rows `width` apart: what a ReLU gave, of whose input the gradient
  // is computed.
  const float* rectified = nullptr;
};

// How it is computed.
enum class LinearWay {
  kDots,            // b is transposed and both are read along their rows
  kInPlace,         // a is read where it lies
  kShallow,         // no depth to speak of: rows of b are summed; in the order of kInPlace
  kPackedByRows,    // of many rows; in the order of kInPlace
  kPackedByColumns  // of up to 512 rows
};

namespace {
constexpr bool is_packed(LinearWay way) {
  return way == LinearWay::kPackedByRows || way == LinearWay::kPackedByColumns;
}
}  // namespace

// `rows` are those of the whole product, of which this may be a piece.
struct LinearBlocks {
  // Bytes of scratch memory, aligned to 64 bytes.
  int64_t (*scratch_bytes)(const LinearProduct& product, LinearWay way, int64_t rows);
  void (*product)(const LinearProduct& product, LinearWay way, int64_t rows, void* spare);
};

LinearBlocks linear_blocks_portable();
LinearBlocks linear_blocks_avx2();
LinearBlocks linear_blocks_avx512();

}  // namespace heterps
