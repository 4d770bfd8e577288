// Compiled once for each instruction set (see gemm.h for what that forbids here), whose name CMake
// gives as HETERPS_INSTRUCTIONS, and HETERPS_TILING.
#include "linear_blocks.h"

#include "instructions.h"
#include "packed_product.h"

namespace heterps {
namespace {

using Tile = Tiling<HETERPS_TILING>;

Blocking cut_of(const LinearProduct& p, LinearWay way, int64_t rows) {
  return way == LinearWay::kPackedByRows ? by_rows() : by_columns(rows, p.depth);
}

int64_t scratch_bytes(const LinearProduct& p, LinearWay way, int64_t rows) {
  const int64_t elements = is_packed(way) ? packed_scratch<Tile, float>(p.n, cut_of(p, way, rows))
                                          : multiply_scratch<Tile, float>(p.m);
  return elements * static_cast<int64_t>(sizeof(float));
}

// Rows from .. to of what was summed. As torch has it, what is not a number stays so.
void finish(const LinearProduct& p, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; ++i) {
    float* row = p.to + i * p.width;
    if (p.bias != nullptr) {
      for (int64_t j = 0; j < p.n; ++j) row[j] += p.bias[j];
    }
    if (p.relu) {
      for (int64_t j = 0; j < p.n; ++j) row[j] = row[j] < 0 ? 0 : row[j];
    }
    if (p.rectified != nullptr) {
      const float* given = p.rectified + i * p.width;
      for (int64_t j = 0; j < p.n; ++j) row[j] = given[j] <= 0 ? 0 : row[j];
    }
  }
}

void shallow(const LinearProduct& p) {
  for (int64_t i = 0; i < p.m; ++i) {
    float* row = p.to + i * p.width;
    for (int64_t k = 0; k < p.depth; ++k) {
      const float factor = p.a[i * p.a_row + k * p.a_column];
      const float* from = p.b + k * p.b_row;
      if (k == 0) {
        for (int64_t j = 0; j < p.n; ++j) row[j] = factor * from[j];
      } else {
        for (int64_t j = 0; j < p.n; ++j) row[j] += factor * from[j];
      }
    }
    finish(p, i, i + 1);
  }
}

void product(const LinearProduct& p, LinearWay way, int64_t rows, void* memory) {
  float* spare = static_cast<float*>(memory);
  const Matrix<float> a{p.a, p.a_row, p.a_column}, b{p.b, p.b_row, p.b_column};
  if (is_packed(way)) {
    multiply_packed<Tile>(p.m, p.n, p.depth, a, b, p.to, p.width, cut_of(p, way, rows), spare,
                          [&](int64_t from, int64_t to) { finish(p, from, to); });
    return;
  }
  if (way == LinearWay::kShallow) return shallow(p);
  if (way == LinearWay::kDots) {
    multiply_dots<Tile>(p.m, p.n, p.depth, p.a, p.a_row, p.b, p.b_column, p.to, p.width);
  } else {
    multiply<Tile>(p.m, p.n, p.depth, a, b, p.to, p.width, spare);
  }
  finish(p, 0, p.m);
}

}  // namespace

LinearBlocks HETERPS_NAMED(linear_blocks)() { return {scratch_bytes, product}; }

}  // namespace heterps
