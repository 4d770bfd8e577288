// A matrix product for one core, on which the CPU twin of grouped_ffn is built.
//
// Why not the BLAS of torch: the library is compiled against no torch, groups are small, so that a
// call for each spends much of its time on the call, and float16 and bfloat16 become float32 while
// a panel is packed instead of in copies of whole weights. Blocking after Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication" (2008): panels of B are packed, A is read
// where it lies. For few rows B is read where it lies, too: to pack it would be most of the work.
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
#include "past_cache.h"

namespace heterps {
namespace {

constexpr int64_t kDepth = 256;    // of a packed panel: 16 KiB of float32 under AVX2
constexpr int64_t kFew = 16;       // rows up to which a transposed B is not worth its packing
constexpr int64_t kUnpacked = 64;  // rows up to which another B is not
constexpr int64_t kBlock = 256;    // columns asked for together: the second cache holds them

// Vector width and rows of a tile; a tile is two vectors wide.
template <int Bytes, int Rows>
struct Tiling {
  static constexpr int kBytes = Bytes;
  static constexpr int kRows = Rows;
};

// Rows of memory that are read next, asked for while others are worked on: a line in every few
// steps, or several in each where few rows are multiplied, so that no step waits for the lines on
// their way, and in the order in which they lie, so that the processor's own prefetching goes
// along.
struct Ahead {
  static constexpr int64_t kNever = int64_t{1} << 62;  // steps
  const char* at = nullptr;
  int64_t row = 0;    // bytes from a row to the next
  int64_t width = 0;  // bytes of a row that are wanted: whole lines
  int64_t rows = 0;   // that are left
  int64_t done = 0;   // bytes of this row
  int64_t every = 1;  // steps
  int64_t wait = kNever;
  int64_t lines = 1;  // of a step

  [[gnu::always_inline]] void step() {
    if (--wait > 0) return;
    wait = every;
    for (int64_t i = 0; i < lines; ++i) {
      __builtin_prefetch(at + done, 0, 2);
      done += 64;
      if (done < width) continue;
      at += row;
      done = 0;
      if (--rows > 0) continue;
      wait = kNever;
      return;
    }
  }
};

// Nothing is asked for while a tile is worked on.
struct NotAhead {
  void step() {}
};

// What becomes of a sum: it is written, added to what is there, or written past the cache.
enum class Put { kWrite, kAdd, kPast };

// c[Rows, 2 vectors] = a[Rows, depth] * panel[depth, 2 vectors], whose rows are `across` apart; the
// last columns may be cut. Two steps at a time: what counts them is half as much, which shows where
// another thread has half of the core.
template <int Bytes, int Rows, bool ARowsAdjacent, typename S, typename Asked>
inline void tile(int64_t depth, const S* a, int64_t stride, const S* panel, int64_t across, Put put,
                 S* c, int64_t width, int64_t columns, Asked& ahead) {
  using Loose = typename Vector<S, Bytes>::Loose;
  using Vec = typename Vector<S, Bytes>::Type;
  constexpr int kLanes = Bytes / sizeof(S);
  Vec sums[Rows][2] = {};
  // Of three rows each: what an address for each needs does not fit into registers.
  constexpr int kBases = ARowsAdjacent ? 1 : (Rows + 2) / 3;
  const S* at[kBases];
  for (int i = 0; i < kBases; ++i) at[i] = a + 3 * i * stride;
  const int64_t next = ARowsAdjacent ? stride : 1;
  if (put != Put::kPast) {  // lines that are written are fetched before, too
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      __builtin_prefetch(c + i * width, 1);
      __builtin_prefetch(c + i * width + kLanes, 1);
    }
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    const Vec left = *reinterpret_cast<const Loose*>(panel + k * across);
    const Vec right = *reinterpret_cast<const Loose*>(panel + k * across + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const S factor = ARowsAdjacent ? at[0][i + k * next] : at[i / 3][i % 3 * stride + k];
      sums[i][0] += factor * left;
      sums[i][1] += factor * right;
    }
  };
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2, panel += 2 * across) {
    ahead.step();
    step(0);
    step(1);
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) at[i] += 2 * next;
  }
  if (k < depth) {
    ahead.step();
    step(0);
  }
  if (put == Put::kPast && columns >= 2 * kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i, c += width) {
      write_past_cache(c, sums[i][0]);
      write_past_cache(c + kLanes, sums[i][1]);
    }
    return;
  }
  const bool add = put == Put::kAdd;
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
template <int Bytes, int Rows, bool Packed, typename S, typename Asked>
inline void tile_of(int64_t rows, int64_t depth, const S* a, int64_t stride, const S* panel,
                    int64_t across, Put put, S* c, int64_t width, int64_t columns, Asked& ahead) {
  if constexpr (Rows > 1) {
    if (rows < Rows) {
      return tile_of<Bytes, Rows - 1, Packed>(rows, depth, a, stride, panel, across, put, c, width,
                                              columns, ahead);
    }
  }
  tile<Bytes, Rows, Packed>(depth, a, stride, panel, across, put, c, width, columns, ahead);
}

// All rows of a panel's columns, in tiles as even as they can be, but for packed ones. Row i begins
// at a[i * step]; where rows are adjacent they are read `stride` apart (see pack_rows), else each
// for itself.
template <int Bytes, int Rows, bool Adjacent, typename S>
void column_of_tiles(int64_t rows, int64_t depth, const S* a, int64_t step, int64_t stride,
                     const S* panel, int64_t across, Put put, S* c, int64_t width, int64_t columns,
                     Ahead& ahead) {
  const bool packed = Adjacent && step != 1;
  const int64_t tiles = (rows + Rows - 1) / Rows;
  int64_t i = 0;
  for (int64_t n = 0; n < tiles; ++n) {
    const int64_t end = packed ? (rows < i + Rows ? rows : i + Rows) : rows * (n + 1) / tiles;
    tile_of<Bytes, Rows, Adjacent>(end - i, depth, a + i * step, stride, panel, across, put,
                                   c + i * width, width, columns, ahead);
    i = end;
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

inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

// What of `b`, of so many rows and columns, is read first, to be asked for in so many steps.
template <int kWide, typename T>
inline Ahead ahead_of(const Matrix<T>& b, int64_t depth, int64_t columns, int64_t steps) {
  const auto lines = [](int64_t elements) {
    return (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64;
  };
  const bool along = b.column == 1;
  const int64_t deep = least(depth, kDepth);
  const int64_t width = lines(along ? least(columns, kBlock) : deep);
  const int64_t rows = along ? deep : least(columns, kWide);
  const int64_t apart = (along ? b.row : b.column) * static_cast<int64_t>(sizeof(T));
  if (width == 0 || rows == 0 || steps == 0) return {};
  const int64_t every = steps > rows * width ? steps / (rows * width) : 1;
  const int64_t at_once = (rows * width + steps - 1) / steps;
  return {reinterpret_cast<const char*>(b.data), apart, width * 64, rows, 0, every, every, at_once};
}

// Whether so many lines, and their neighbours, can be in the first cache at once: those a power of
// two apart take each other's place.
inline bool fits_first_cache(int64_t lines, uint64_t apart) {
  constexpr uint64_t kPage = 4096, kBytes = 16384;  // the lines of a place, half of the cache
  const uint64_t lowest = apart & -apart;
  return static_cast<uint64_t>(lines) * (lowest < kPage ? lowest : kPage) <= kBytes;
}

// Elements of scratch memory that multiply() needs for so many rows.
template <typename Tile, typename S>
constexpr int64_t multiply_scratch(int64_t rows) {
  return kDepth * (2 * Tile::kBytes / static_cast<int64_t>(sizeof(S)) + rows + Tile::kRows);
}

// What will be multiplied by next, if that is known: else it has no columns.
template <typename T>
struct After {
  Matrix<T> b = {};
  int64_t depth = 0;
  int64_t columns = 0;
};

// c[m, n], rows `width` apart, = a[m, depth] * b[depth, n]; `past` the cache where that can be, for
// sums that nobody reads soon: then finish_past_cache() makes them others' to read.
template <typename Tile, typename A, typename B, typename S>
inline void multiply(int64_t m, int64_t n, int64_t depth, const Matrix<A>& a, const Matrix<B>& b,
                     S* c, int64_t width, S* scratch, const After<B>& after = {},
                     bool past = false) {
  constexpr int kRows = Tile::kRows;
  constexpr int kWide = 2 * Tile::kBytes / static_cast<int>(sizeof(S));
  if (depth == 0) {
    for (int64_t i = 0; i < m; ++i) std::memset(c + i * width, 0, sizeof(S) * n);
    return;
  }
  S* panel = scratch;
  S* converted = scratch + kDepth * kWide;
  const bool adjacent = a.row == 1 && a.column != 1;
  const bool lines = (reinterpret_cast<uintptr_t>(c) | (width * sizeof(S))) % Tile::kBytes == 0;
  const Put first = past && lines && depth <= kDepth ? Put::kPast : Put::kWrite;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = depth - k < kDepth ? depth - k : kDepth;
    const S* left = converted;
    int64_t stride = adjacent ? kRows : deep, step = deep;
    constexpr bool kSame = std::is_same_v<A, S>;
    if (kSame && (!adjacent || fits_first_cache(deep, a.column * sizeof(S)))) {
      if constexpr (kSame) left = a.data + k * a.column;
      step = a.row, stride = adjacent ? a.column : a.row;
    } else if (adjacent) {
      pack_rows<kRows>(m, deep, a.data + k * a.column, a.column, converted);
    } else {
      for (int64_t i = 0; i < m; ++i) {
        const A* from = a.data + i * a.row + k;
        for (int64_t j = 0; j < deep; ++j) converted[i * deep + j] = static_cast<S>(from[j]);
      }
    }
    // What lies along its rows is asked for in blocks of several panels.
    const int64_t block = b.column == 1 ? kBlock : kWide;
    const auto part = [&](int64_t row, int64_t column) {
      return Matrix<B>{b.data + row * b.row + column * b.column, b.row, b.column};
    };
    Ahead ahead;
    for (int64_t j = 0; j < n; j += kWide) {
      if (j % block == 0) {
        const int64_t panels = ((n - j < block ? n - j : block) + kWide - 1) / kWide;
        const int64_t steps = panels * ((m + kRows - 1) / kRows) * ((deep + 1) / 2);
        if (j + block < n) {
          ahead = ahead_of<kWide>(part(k, j + block), deep, n - j - block, steps);
        } else if (k + kDepth < depth) {
          ahead = ahead_of<kWide>(part(k + kDepth, 0), depth - k - kDepth, n, steps);
        } else {
          ahead = ahead_of<kWide>(after.b, after.depth, after.columns, steps);
        }
      }
      const int64_t columns = n - j < kWide ? n - j : kWide;
      const S* right = panel;
      int64_t across = kWide;
      if constexpr (std::is_same_v<B, S>) {
        if (m <= kUnpacked && b.column == 1 && columns == kWide) {
          right = part(k, j).data, across = b.row;
        }
      }
      if (right == panel) pack<Tile::kBytes, kWide>(deep, columns, part(k, j), panel);
      if (adjacent) {
        column_of_tiles<Tile::kBytes, kRows, true>(m, deep, left, step, stride, right, across,
                                                   k > 0 ? Put::kAdd : first, c + j, width, columns,
                                                   ahead);
      } else {
        column_of_tiles<Tile::kBytes, kRows, false>(m, deep, left, step, stride, right, across,
                                                    k > 0 ? Put::kAdd : first, c + j, width,
                                                    columns, ahead);
      }
    }
  }
}

}  // namespace
}  // namespace heterps
