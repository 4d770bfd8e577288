// A product of large matrices for one core: both are packed, each once, in blocks that lie in the
// caches while they are used. After Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication" (2008), and BLIS (Van Zee and van de Geijn, 2015).
//
// gemm.h reads A where it lies, from the second cache. Where another thread has half of that, and
// of the first cache, rows that lie apart are read again and again; packed ones come in order. What
// is packed next is asked for while tiles are worked on, so that packing waits for no memory.
#pragma once

#include "gemm.h"

namespace heterps {
namespace {

constexpr int64_t kHeldElements = 80 * 1024;  // of A, that the second cache holds
constexpr int64_t kRowsAtOnce = 72;           // a multiple of all tiles' rows

// How a product is cut. It says in which order is summed, so it follows from the whole, of which
// threads may have pieces.
struct Blocking {
  int64_t depth;  // that is summed at a time
  int64_t rows;   // of A that are packed at a time
  bool resident;  // all columns of B are kept packed, for all rows; else one panel at a time
};

// For many rows: all columns of B are packed, which a third cache holds, and a few rows of A at a
// time. An element is summed as multiply() does it.
inline Blocking by_rows() { return {kDepth, kRowsAtOnce, true}; }

// For a deep product of few rows: all of them are packed, and B a panel at a time.
inline Blocking by_columns(int64_t m, int64_t depth) {
  const int64_t held = least(kHeldElements / m, kDepth);
  const int64_t parts = (depth + held - 1) / held;  // as even as they can be
  return {(depth + parts - 1) / parts, m, false};
}

template <typename Tile, typename S>
constexpr int64_t kWideOf = 2 * Tile::kBytes / static_cast<int64_t>(sizeof(S));

// Elements of scratch memory that multiply_packed() needs.
template <typename Tile, typename S>
int64_t packed_scratch(int64_t n, const Blocking& cut) {
  const int64_t wide = kWideOf<Tile, S>;
  const int64_t columns = cut.resident ? (n + wide - 1) / wide * wide : wide;
  return cut.depth * (cut.rows + Tile::kRows + columns) + 2 * wide;
}

// to[m / Rows][depth][Rows] = a[m, depth]; a vector behind its end may be written.
template <typename Tile, typename S>
void pack_left(int64_t m, int64_t depth, const Matrix<S>& a, S* to) {
  using Vec = typename Vector<S, Tile::kBytes>::Type;
  using Loose = typename Vector<S, Tile::kBytes>::Loose;
  constexpr int kRows = Tile::kRows, kLanes = Tile::kBytes / sizeof(S);
  static_assert(kRows <= kLanes);
  if (a.row == 1) {
    pack_rows<kRows>(m, depth, a.data, a.column, to);
    return;
  }
  for (int64_t i = 0; i < m; i += kRows, to += depth * kRows) {
    const S* from = a.data + i * a.row;
    int64_t k = 0;
    // Squares, of which some rows are of no use: a vector of them overlaps the one before.
    for (; m - i >= kRows && k + kLanes <= depth; k += kLanes) {
      Vec square[kLanes] = {};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        square[r] = *reinterpret_cast<const Loose*>(from + r * a.row + k);
      }
      transpose<1>(square, std::make_integer_sequence<int, kLanes>{});
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        *reinterpret_cast<Loose*>(to + (k + j) * kRows) = square[j];
      }
    }
    const int64_t rows = m - i < kRows ? m - i : kRows;
    for (; k < depth; ++k) {
      for (int64_t r = 0; r < rows; ++r) to[k * kRows + r] = from[r * a.row + k];
    }
  }
}

// c[m, n], rows `width` apart, = a[m, depth] * b[depth, n]. Rows from .. to of it are given to
// `finish` as soon as they are summed, while the cache has them.
template <typename Tile, typename S, typename Finish>
void multiply_packed(int64_t m, int64_t n, int64_t depth, const Matrix<S>& a, const Matrix<S>& b,
                     S* c, int64_t width, const Blocking& cut, S* scratch, const Finish& finish) {
  constexpr int kRows = Tile::kRows;
  constexpr int64_t kWide = kWideOf<Tile, S>;
  S* right = scratch;
  S* left = scratch + cut.depth * (cut.resident ? (n + kWide - 1) / kWide * kWide : kWide);
  for (int64_t k = 0; k < depth; k += cut.depth) {
    const int64_t deep = least(cut.depth, depth - k);
    const auto rows_at = [&](int64_t i) {
      return Matrix<S>{a.data + i * a.row + k * a.column, a.row, a.column};
    };
    const auto columns_at = [&](int64_t j) {
      return Matrix<S>{b.data + k * b.row + j * b.column, b.row, b.column};
    };
    for (int64_t i = 0; i < m; i += cut.rows) {
      const int64_t rows = least(cut.rows, m - i);
      pack_left<Tile>(rows, deep, rows_at(i), left);
      const int64_t tiles = (rows + kRows - 1) / kRows;
      Ahead ahead;
      if (cut.resident && i + rows < m) {
        const int64_t after = least(cut.rows, m - i - rows);
        const S* from = rows_at(i + rows).data;
        const bool adjacent = a.row == 1;
        ahead = ahead_of<kRowsAtOnce>(Matrix<S>{from, adjacent ? a.column : a.row, 1},
                                      adjacent ? deep : after, adjacent ? after : deep,
                                      tiles * ((n + kWide - 1) / kWide));
      }
      for (int64_t j = 0; j < n; j += kWide) {
        const int64_t columns = least(kWide, n - j);
        S* panel = cut.resident ? right + j * deep : right;
        if (!cut.resident || i == 0) {
          pack<Tile::kBytes, kWide>(deep, columns, columns_at(j), panel);
        }
        if (!cut.resident && j + kWide < n) {  // lines, which may lie across those of memory
          ahead = ahead_of<kWide>(columns_at(j + kWide), deep, 2 * kWide - 1, tiles);
        }
        for (int64_t r = 0; r < rows; r += kRows) {
          ahead.step();
          NotAhead none;
          tile_of<Tile::kBytes, kRows, true>(rows - r, deep, left + r * deep, kRows, panel, kWide,
                                             k > 0 ? Put::kAdd : Put::kWrite,
                                             c + (i + r) * width + j, width, columns, none);
        }
      }
      if (k + deep == depth) finish(i, i + rows);
    }
  }
}

}  // namespace
}  // namespace heterps
