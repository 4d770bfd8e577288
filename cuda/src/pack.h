// How operands of gemm.h are laid out for its tiles: rows side by side, columns in panels.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace heterps {
namespace {

// Element (i, j) lies at data[i * row + j * column]; one of the two is 1.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row;
  int64_t column;
};

template <typename S, int Bytes>
struct Vector {
  typedef S Type __attribute__((vector_size(Bytes)));
  typedef S Loose __attribute__((vector_size(Bytes), aligned(alignof(S)), may_alias));
};

// Of a matrix whose columns lie together: to[rows / Rows][depth][Rows]. Read where they lie,
// columns a power of two apart would throw each other out of the first cache.
template <int Rows, typename A, typename S>
void pack_rows(int64_t rows, int64_t depth, const A* a, int64_t column, S* to) {
  for (int64_t k = 0; k < depth; ++k) {
    const A* from = a + k * column;
    int64_t i = 0;
    for (; i + Rows <= rows; i += Rows) {
      S* tile = to + i * depth + k * Rows;
      for (int j = 0; j < Rows; ++j) tile[j] = static_cast<S>(from[i + j]);
    }
    for (int64_t j = i; j < rows; ++j) {
      to[i * depth + k * Rows + j - i] = static_cast<S>(from[j]);
    }
  }
}

// Of two rows of a square that are `Step` apart: those lanes of the first that have this bit set
// and those of the second that do not change places.
template <int Step, typename Vec, int... Lane>
[[gnu::always_inline]] inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, Lane...>) {
  constexpr int kLanes = sizeof...(Lane);
#ifdef __clang__
  const Vec first = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + Lane - Step : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + Lane : Lane + Step)...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t>;
  typedef Index Mask __attribute__((vector_size(sizeof(Vec))));
  constexpr Mask kFirst = {(Lane & Step ? kLanes + Lane - Step : Lane)...};
  constexpr Mask kSecond = {(Lane & Step ? kLanes + Lane : Lane + Step)...};
  const Vec first = __builtin_shuffle(a, b, kFirst);
  b = __builtin_shuffle(a, b, kSecond);
#endif
  a = first;
}

// Transposes a square of as many rows as a row has lanes.
template <int Step, typename Vec, int... Lane>
[[gnu::always_inline]] inline void transpose(Vec* rows, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Step < static_cast<int>(sizeof...(Lane))) {
#pragma GCC unroll 16
    for (int i = 0; i < static_cast<int>(sizeof...(Lane)); ++i) {
      if ((i & Step) == 0) exchange<Step>(rows[i], rows[i + Step], lanes);
    }
    transpose<2 * Step>(rows, lanes);
  }
}

// panel[depth, kWide] = b[depth, columns], the missing columns zero.
template <int Bytes, int kWide, typename T, typename S>
inline void pack(int64_t depth, int64_t columns, const Matrix<T>& b, S* panel) {
  if (columns < kWide) std::memset(panel, 0, sizeof(S) * depth * kWide);
  if (b.column == 1) {
    for (int64_t k = 0; k < depth; ++k, panel += kWide) {
      const T* from = b.data + k * b.row;
      if (columns == kWide) {
        for (int j = 0; j < kWide; ++j) panel[j] = static_cast<S>(from[j]);
      } else {
        for (int64_t j = 0; j < columns; ++j) panel[j] = static_cast<S>(from[j]);
      }
    }
    return;
  }
  // Transposes squares in registers: both sides move in whole vectors.
  using Vec = typename Vector<S, Bytes>::Type;
  using Loose = typename Vector<S, Bytes>::Loose;
  constexpr int kLanes = Bytes / sizeof(S);
  int64_t k = 0;
  for (; columns == kWide && k + kLanes <= depth; k += kLanes) {
    for (int j0 = 0; j0 < kWide; j0 += kLanes) {
      Vec square[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const T* from = b.data + (j0 + j) * b.column + k;
        if constexpr (std::is_same_v<T, S>) {
          square[j] = *reinterpret_cast<const Loose*>(from);
        } else {
          square[j] = Vec{};
          for (int i = 0; i < kLanes; ++i) square[j][i] = static_cast<S>(from[i]);
        }
      }
      transpose<1>(square, std::make_integer_sequence<int, kLanes>{});
      for (int i = 0; i < kLanes; ++i) {
        *reinterpret_cast<Loose*>(panel + (k + i) * kWide + j0) = square[i];
      }
    }
  }
  for (; k < depth; ++k) {
    for (int64_t j = 0; j < columns; ++j) {
      panel[k * kWide + j] = static_cast<S>(b.data[j * b.column + k]);
    }
  }
}

}  // namespace
}  // namespace heterps
