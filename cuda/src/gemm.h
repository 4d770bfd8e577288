// A matrix product for one core, on which the CPU twin of grouped_ffn is built.
//
// Why not the BLAS of torch: the library is compiled against no torch, groups are small, so that a
// call for each spends much of its time on the call, and float16 and bfloat16 become float32 while
// a panel is packed instead of in copies of whole weights. Blocking after Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication" (2008): panels of B are packed, A is read
// where it lies. Few rows are another matter: then B is most of the work, and is read once.
//
// Compiled once for each instruction set, so everything here has internal linkage and nothing calls
// inline functions of the standard library that another file may share. An element is summed over k
// in one fixed order, whatever the blocks and threads: equal inputs give equal bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "heterps/half.h"
#include "pack.h"

namespace heterps {
namespace {

constexpr int64_t kDepth = 256;  // of a packed panel: 16 KiB of float32 under AVX2
constexpr int64_t kFew = 16;     // rows up to which packing B costs more than it saves
constexpr int64_t kSpan = 256;   // columns that few rows are summed over at once

// Vector width and rows of a tile; a tile is two vectors wide.
template <int Bytes, int Rows>
struct Tiling {
  static constexpr int kBytes = Bytes;
  static constexpr int kRows = Rows;
};

// The panel that will be packed next, asked for while another is worked on: two cache lines in each
// step, at `at` + (step mod 2^bits) * row + (step / 2^bits) * 64 and `second` behind that.
struct Ahead {
  const char* at = nullptr;
  int64_t row = 0;
  int64_t second = 0;
  int64_t steps = 0;
  int bits = 0;

  inline void ask(int64_t step) const {
    const char* line = at + (step & ((int64_t{1} << bits) - 1)) * row + (step >> bits) * 64;
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + second, 0, 2);
  }
};

// c[Rows, 2 vectors] (+)= a[Rows, depth] * panel[depth, 2 vectors]; the last columns may be cut.
template <int Bytes, int Rows, bool ARowsAdjacent, bool Asks, typename S>
inline void tile(int64_t depth, const S* a, int64_t stride, const S* panel, bool add, S* c,
                 int64_t width, int64_t columns, const Ahead& ahead, int64_t asked) {
  using Loose = typename Vector<S, Bytes>::Loose;
  using Vec = typename Vector<S, Bytes>::Type;
  constexpr int kLanes = Bytes / sizeof(S);
  Vec sums[Rows][2] = {};
  for (int64_t k = 0; k < depth; ++k, panel += 2 * kLanes) {
    if constexpr (Asks) {
      if (asked + k < ahead.steps) ahead.ask(asked + k);
    }
    const Vec left = *reinterpret_cast<const Loose*>(panel);
    const Vec right = *reinterpret_cast<const Loose*>(panel + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const S factor = ARowsAdjacent ? a[k * stride + i] : a[i * stride + k];
      sums[i][0] += factor * left;
      sums[i][1] += factor * right;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i, c += width) {
    if (columns >= 2 * kLanes) {
      Loose* out = reinterpret_cast<Loose*>(c);
      Loose* out_right = reinterpret_cast<Loose*>(c + kLanes);
      *out = add ? *out + sums[i][0] : sums[i][0];
      *out_right = add ? *out_right + sums[i][1] : sums[i][1];
    } else {
      S row[2 * kLanes];
      std::memcpy(row, sums[i], sizeof row);
      for (int64_t j = 0; j < columns; ++j) c[j] = add ? c[j] + row[j] : row[j];
    }
  }
}

// A tile of `rows` rows, 1 to Rows.
template <int Bytes, int Rows, bool Packed, bool Asks, typename S>
inline void tile_of(int64_t rows, int64_t depth, const S* a, int64_t stride, const S* panel,
                    bool add, S* c, int64_t width, int64_t columns, const Ahead& ahead,
                    int64_t asked) {
  if constexpr (Rows > 1) {
    if (rows < Rows) {
      return tile_of<Bytes, Rows - 1, Packed, Asks>(rows, depth, a, stride, panel, add, c, width,
                                                    columns, ahead, asked);
    }
  }
  tile<Bytes, Rows, Packed, Asks>(depth, a, stride, panel, add, c, width, columns, ahead, asked);
}

// All rows of a panel's columns, in tiles as even as they can be. Packed, the rows of a tile lie
// side by side (see pack_rows), else `stride` apart.
template <int Bytes, int Rows, bool Packed, typename S>
void column_of_tiles(int64_t rows, int64_t depth, const S* a, int64_t stride, const S* panel,
                     bool add, S* c, int64_t width, int64_t columns, const Ahead& ahead) {
  const int64_t step = Packed ? depth : stride;
  const int64_t tiles = (rows + Rows - 1) / Rows;
  int64_t i = 0;
  for (int64_t n = 0; n < tiles; ++n) {
    const int64_t end = Packed ? (rows < i + Rows ? rows : i + Rows) : rows * (n + 1) / tiles;
    const int64_t asked = n * depth;
    if (asked < ahead.steps) {
      tile_of<Bytes, Rows, Packed, true>(end - i, depth, a + i * step, stride, panel, add,
                                         c + i * width, width, columns, ahead, asked);
    } else {
      tile_of<Bytes, Rows, Packed, false>(end - i, depth, a + i * step, stride, panel, add,
                                          c + i * width, width, columns, ahead, asked);
    }
    i = end;
  }
}

// sums[Rows, columns], rows kSpan apart, += a[Rows, Deep] * b[Deep, columns].
template <int Bytes, int Rows, int Deep, typename S>
inline void few_step(const S* a, int64_t stride, const S* b, int64_t across, int64_t columns,
                     S* sums) {
  using Loose = typename Vector<S, Bytes>::Loose;
  using Vec = typename Vector<S, Bytes>::Type;
  constexpr int kLanes = Bytes / sizeof(S);
  S factors[Rows][Deep];
  for (int i = 0; i < Rows; ++i) {
    for (int k = 0; k < Deep; ++k) factors[i][k] = a[i * stride + k];
  }
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Vec values[Deep];
    for (int k = 0; k < Deep; ++k) values[k] = *reinterpret_cast<const Loose*>(b + k * across + j);
    for (int i = 0; i < Rows; ++i) {
      Loose* out = reinterpret_cast<Loose*>(sums + i * kSpan + j);
      Vec sum = *out;
      for (int k = 0; k < Deep; ++k) sum += factors[i][k] * values[k];
      *out = sum;
    }
  }
  for (; j < columns; ++j) {
    for (int i = 0; i < Rows; ++i) {
      for (int k = 0; k < Deep; ++k) sums[i * kSpan + j] += factors[i][k] * b[k * across + j];
    }
  }
}

// c[m, n] (+)= a[m, depth] * b[depth, n] for few rows: b is read once, along its rows, and not
// packed. Sums in the order of tile(), so how many rows a block has does not show.
template <int Bytes, typename S>
void multiply_few(int64_t m, int64_t n, int64_t depth, const S* a, int64_t stride, const S* b,
                  int64_t across, bool add, S* c, int64_t width, S* sums) {
  constexpr int kDeep = 4;
  for (int64_t j = 0; j < n; j += kSpan) {
    const int64_t columns = n - j < kSpan ? n - j : kSpan;
    for (int64_t i = 0; i < m; ++i) std::memset(sums + i * kSpan, 0, sizeof(S) * columns);
    const auto step = [&](auto deep, int64_t k) {
      constexpr int kNow = decltype(deep)::value;
      const S* from = b + k * across + j;
      int64_t i = 0;
      for (; i + 2 <= m; i += 2) {
        few_step<Bytes, 2, kNow>(a + i * stride + k, stride, from, across, columns,
                                 sums + i * kSpan);
      }
      if (i < m) {
        few_step<Bytes, 1, kNow>(a + i * stride + k, stride, from, across, columns,
                                 sums + i * kSpan);
      }
    };
    int64_t k = 0;
    for (; k + kDeep <= depth; k += kDeep) step(std::integral_constant<int, kDeep>{}, k);
    for (; k < depth; ++k) step(std::integral_constant<int, 1>{}, k);
    for (int64_t i = 0; i < m; ++i) {
      S* out = c + i * width + j;
      const S* sum = sums + i * kSpan;
      for (int64_t v = 0; v < columns; ++v) out[v] = add ? out[v] + sum[v] : sum[v];
    }
  }
}

// c[i + r, j + s] = the dot product of row r of a and row s of b.
template <int Bytes, int Rows, int Columns, typename S>
inline void dots(int64_t depth, const S* a, int64_t stride, const S* b, int64_t across, S* c,
                 int64_t width) {
  using Loose = typename Vector<S, Bytes>::Loose;
  using Vec = typename Vector<S, Bytes>::Type;
  constexpr int kLanes = Bytes / sizeof(S);
  Vec sums[Rows][Columns] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    Vec left[Rows];
    for (int i = 0; i < Rows; ++i) left[i] = *reinterpret_cast<const Loose*>(a + i * stride + k);
    for (int j = 0; j < Columns; ++j) {
      const Vec right = *reinterpret_cast<const Loose*>(b + j * across + k);
      for (int i = 0; i < Rows; ++i) sums[i][j] += left[i] * right;
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) {
      S sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[i][j][lane];
      for (int64_t rest = k; rest < depth; ++rest) {
        sum += a[i * stride + rest] * b[j * across + rest];
      }
      c[i * width + j] = sum;
    }
  }
}

// c[m, n], rows `width` apart, = a[m, depth] * the transpose of b[n, depth], for few rows: b is
// read once, along its rows. Not in the order of multiply(): for whole groups, not for blocks.
template <typename Tile, typename S>
void multiply_dots(int64_t m, int64_t n, int64_t depth, const S* a, int64_t stride, const S* b,
                   int64_t across, S* c, int64_t width) {
  constexpr int kBytes = Tile::kBytes;
  int64_t j = 0;
  for (; j + 4 <= n; j += 4, b += 4 * across) {
    int64_t i = 0;
    for (; i + 2 <= m; i += 2) {
      dots<kBytes, 2, 4>(depth, a + i * stride, stride, b, across, c + i * width + j, width);
    }
    if (i < m)
      dots<kBytes, 1, 4>(depth, a + i * stride, stride, b, across, c + i * width + j, width);
  }
  for (; j < n; ++j, b += across) {
    for (int64_t i = 0; i < m; ++i) {
      dots<kBytes, 1, 1>(depth, a + i * stride, stride, b, across, c + i * width + j, width);
    }
  }
}

// The first panel of `b`, which has so many rows.
template <int kWide, typename T>
inline Ahead ahead_of(const Matrix<T>& b, int64_t depth) {
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  const char* at = reinterpret_cast<const char*>(b.data);
  const int64_t deep = depth < kDepth ? depth : kDepth;
  if (b.column == 1) return {at, b.row * kSize, kWide * kSize > 64 ? 64 : 0, deep, 62};
  constexpr int kBits = kWide == 4 ? 2 : kWide == 8 ? 3 : kWide == 16 ? 4 : 5;
  static_assert(kWide == 1 << kBits);
  const int64_t half = (deep * kSize + 127) / 128;  // of the lines of a row
  return {at, b.column * kSize, half * 64, half << kBits, kBits};
}

// Elements of scratch memory that multiply() needs for so many rows.
template <typename Tile, typename S>
constexpr int64_t multiply_scratch(int64_t rows) {
  return kDepth * (2 * Tile::kBytes / static_cast<int64_t>(sizeof(S)) + rows + Tile::kRows);
}

// c[m, n], rows `width` apart, = a[m, depth] * b[depth, n]. `after` is what will be multiplied by
// next, if that is known: its data is null or it has `after_depth` rows.
template <typename Tile, typename A, typename B, typename S>
inline void multiply(int64_t m, int64_t n, int64_t depth, const Matrix<A>& a, const Matrix<B>& b,
                     S* c, int64_t width, S* scratch, const Matrix<B>& after = {},
                     int64_t after_depth = 0) {
  constexpr int kRows = Tile::kRows;
  constexpr int kWide = 2 * Tile::kBytes / static_cast<int>(sizeof(S));
  if (depth == 0) {
    for (int64_t i = 0; i < m; ++i) std::memset(c + i * width, 0, sizeof(S) * n);
    return;
  }
  if constexpr (std::is_same_v<A, S> && std::is_same_v<B, S>) {
    if (m <= kFew && a.column == 1 && b.column == 1) {
      for (int64_t k = 0; k < depth; k += kDepth) {
        multiply_few<Tile::kBytes>(m, n, depth - k < kDepth ? depth - k : kDepth, a.data + k, a.row,
                                   b.data + k * b.row, b.row, k > 0, c, width, scratch);
      }
      return;
    }
  }
  S* panel = scratch;
  S* converted = scratch + kDepth * kWide;
  const bool adjacent = a.row == 1 && a.column != 1;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = depth - k < kDepth ? depth - k : kDepth;
    const S* left = converted;
    int64_t stride = adjacent ? kRows : deep;
    if (adjacent) {
      pack_rows<kRows>(m, deep, a.data + k * a.column, a.column, converted);
    } else if constexpr (std::is_same_v<A, S>) {
      left = a.data + k;
      stride = a.row;
    } else {
      for (int64_t i = 0; i < m; ++i) {
        const A* from = a.data + i * a.row + k;
        for (int64_t j = 0; j < deep; ++j) converted[i * deep + j] = static_cast<S>(from[j]);
      }
    }
    for (int64_t j = 0; j < n; j += kWide) {
      const int64_t columns = n - j < kWide ? n - j : kWide;
      const Matrix<B> mine{b.data + k * b.row + j * b.column, b.row, b.column};
      pack<Tile::kBytes, kWide>(deep, columns, mine, panel);
      Ahead ahead;
      if (j + kWide < n) {
        ahead = ahead_of<kWide>(Matrix<B>{mine.data + kWide * b.column, b.row, b.column}, deep);
      } else if (k + kDepth < depth) {
        ahead = ahead_of<kWide>(Matrix<B>{b.data + (k + kDepth) * b.row, b.row, b.column},
                                depth - k - kDepth);
      } else if (after.data != nullptr) {
        ahead = ahead_of<kWide>(after, after_depth);
      }
      if (adjacent) {
        column_of_tiles<Tile::kBytes, kRows, true>(m, deep, left, stride, panel, k > 0, c + j,
                                                   width, columns, ahead);
      } else {
        column_of_tiles<Tile::kBytes, kRows, false>(m, deep, left, stride, panel, k > 0, c + j,
                                                    width, columns, ahead);
      }
    }
  }
}

}  // namespace
}  // namespace heterps
