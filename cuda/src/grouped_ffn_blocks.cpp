// The work on one block of rows; compiled once for each instruction set (see gemm.h for what that
// forbids here), whose name CMake gives as HETERPS_INSTRUCTIONS, and HETERPS_TILING.
#include "grouped_ffn_blocks.h"

#include "activation.h"
#include "gemm.h"
#include "instructions.h"

namespace heterps {
namespace {

template <typename T>
const T* in(const void* data) {
  return static_cast<const T*>(data);
}

// The matrix of `size` elements that a group has.
template <typename T>
const T* of_group(const FfnArrays& arrays, const void* data, int64_t group, int64_t size) {
  if (arrays.places == nullptr) return in<T>(data) + group * size;
  return in<T>(in<char>(data) + arrays.places[group] * arrays.step);
}

template <typename From, typename To>
inline void convert(int64_t n, const From* from, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

// to[m, n], rows `width` apart, = a b, by way of `sums` unless that is what is summed in.
template <typename Tile, typename A, typename B, typename T, typename S>
inline void product(int64_t m, int64_t n, int64_t depth, const Matrix<A>& a, const Matrix<B>& b,
                    T* to, int64_t width, S* sums, S* spare, const After<B>& after = {},
                    bool past = false) {
  if constexpr (std::is_same_v<T, S>) {
    (void)sums;
    multiply<Tile>(m, n, depth, a, b, to, width, spare, after, past);
  } else {
    multiply<Tile>(m, n, depth, a, b, sums, n, spare, after);
    for (int64_t i = 0; i < m; ++i) convert(n, sums + i * n, to + i * width);
  }
}

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename Tile, typename T>
int64_t scratch_bytes(const FfnShape& shape, int64_t rows) {
  const int64_t elements = multiply_scratch<Tile, Sum<T>>(rows) +
                           rows * (larger(shape.dim, shape.inner()) + shape.hidden);
  return elements * static_cast<int64_t>(sizeof(Sum<T>));
}

template <typename T>
int64_t act_bytes(const FfnShape& shape, int64_t rows) {
  return rows * shape.hidden * static_cast<int64_t>(sizeof(Sum<T>));
}

template <typename Tile, typename T>
void first_step(const FfnShape& shape, const FfnArrays& arrays, const Block& block,
                const Columns& units, void* to, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, hidden = shape.hidden, inner = shape.inner();
  const int64_t m = block.end - block.begin, n = units.to - units.from;
  const bool gated = inner != hidden;
  T* kept = arrays.pre == nullptr ? nullptr
                                  : static_cast<T*>(arrays.pre) + block.begin * inner + units.from;
  // Gates, and `value` columns behind them values.
  S* pre = spare + multiply_scratch<Tile, S>(m);
  int64_t width = gated ? 2 * n : n, value = n;
  if constexpr (std::is_same_v<T, S>) {
    if (kept != nullptr) pre = kept, width = inner, value = hidden;
  }
  const Matrix<T> rows{in<T>(arrays.rows) + block.begin * dim, dim, 1};
  const T* w1 = of_group<T>(arrays, arrays.w1, block.group, dim * inner) + units.from;
  if (n == hidden) {
    const T* w2 = of_group<T>(arrays, arrays.w2, block.group, hidden * dim);
    multiply<Tile>(m, inner, dim, rows, Matrix<T>{w1, inner, 1}, pre, width, spare,
                   After<T>{{w2, dim, 1}, hidden, dim});
  } else {
    multiply<Tile>(m, n, dim, rows, Matrix<T>{w1, inner, 1}, pre, width, spare);
    if (gated) {
      multiply<Tile>(m, n, dim, rows, Matrix<T>{w1 + hidden, inner, 1}, pre + value, width, spare);
    }
  }
  S* act = static_cast<S*>(to) + units.from;
  for (int64_t i = 0; i < m; ++i) {
    const S* from = pre + i * width;
    if constexpr (!std::is_same_v<T, S>) {
      if (kept != nullptr) {
        convert(n, from, kept + i * inner);
        if (gated) convert(n, from + value, kept + i * inner + hidden);
      }
    }
    activate(shape.activation, n, from, value, act + i * hidden);
  }
}

template <typename Tile, typename T>
void second_step(const FfnShape& shape, const FfnArrays& arrays, const Block& block,
                 const Columns& columns, const void* act, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, hidden = shape.hidden, m = block.end - block.begin;
  const T* w2 = of_group<T>(arrays, arrays.w2, block.group, hidden * dim) + columns.from;
  const int64_t inner = shape.inner();
  const T* next =
      block.next < 0 ? nullptr : of_group<T>(arrays, arrays.w1, block.next, dim * inner);
  product<Tile>(m, columns.to - columns.from, hidden, Matrix<S>{in<S>(act), hidden, 1},
                Matrix<T>{w2, dim, 1},
                static_cast<T*>(arrays.out) + block.begin * dim + columns.from, dim,
                spare + multiply_scratch<Tile, S>(m), spare,
                After<T>{{next, inner, 1}, dim, next == nullptr ? 0 : inner}, block.past);
  if (block.past) finish_past_cache();
}

// to[m, n], rows `width` apart, = a[m, depth] times the transpose of w[n, depth]; the same bits
// however a group is cut into blocks.
template <typename Tile, typename A, typename T, typename To, typename S>
inline void product_transposed(bool few, int64_t m, int64_t n, int64_t depth, const A* a,
                               const T* w, To* to, int64_t width, S* sums, S* spare,
                               const After<T>& after = {}, bool past = false) {
  if constexpr (std::is_same_v<A, S> && std::is_same_v<T, S> && std::is_same_v<To, S>) {
    if (few) {
      multiply_dots<Tile>(m, n, depth, a, depth, w, depth, to, width);
      return;
    }
  }
  product<Tile>(m, n, depth, Matrix<A>{a, depth, 1}, Matrix<T>{w, 1, depth}, to, width, sums, spare,
                after, past);
}

template <typename Tile, typename T>
void backward_first(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                    const Block& block, const Columns& units, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, hidden = shape.hidden, inner = shape.inner();
  const int64_t m = block.end - block.begin, n = units.to - units.from;
  S* sums = spare + multiply_scratch<Tile, S>(m);
  S* grad_act = sums + m * larger(dim, inner);
  product_transposed<Tile>(
      block.rows <= kFew, m, n, dim, in<T>(gradients.out) + block.begin * dim,
      in<T>(arrays.w2) + (block.group * hidden + units.from) * dim, grad_act, n, sums, spare,
      After<T>{{in<T>(arrays.w1) + block.group * dim * inner, 1, inner}, inner, dim});
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = (block.begin + i) * inner + units.from;
    activate_backward(shape.activation, n, in<T>(arrays.pre) + row, hidden, grad_act + i * n,
                      static_cast<T*>(gradients.pre) + row,
                      static_cast<T*>(arrays.act) + (block.begin + i) * hidden + units.from);
  }
}

template <typename Tile, typename T>
void backward_second(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                     const Block& block, const Columns& columns, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, inner = shape.inner(), m = block.end - block.begin;
  product_transposed<Tile>(block.rows <= kFew, m, columns.to - columns.from, inner,
                           in<T>(gradients.pre) + block.begin * inner,
                           in<T>(arrays.w1) + (block.group * dim + columns.from) * inner,
                           static_cast<T*>(gradients.rows) + block.begin * dim + columns.from, dim,
                           spare + multiply_scratch<Tile, S>(m), spare, {}, block.past);
  if (block.past) finish_past_cache();
}

template <typename Tile, typename T>
void weight_strip(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                  const Strip& strip, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  // The gradient [height, width] is left^T right; left is [rows, height] and right [rows, width].
  const int64_t height = strip.second ? shape.hidden : shape.dim;
  const int64_t width = strip.second ? shape.dim : shape.inner();
  const T* left = in<T>(strip.second ? arrays.act : arrays.rows);
  const T* right = in<T>(strip.second ? gradients.out : gradients.pre);
  T* to = static_cast<T*>(strip.second ? gradients.w2 : gradients.w1);
  const int64_t m = strip.to - strip.from;
  After<T> after;
  if (strip.next >= 0) {
    const T* w2 = in<T>(arrays.w2) + strip.next * shape.hidden * shape.dim;
    after = {{w2, 1, shape.dim}, shape.dim, shape.hidden};
  }
  product<Tile>(m, width, strip.end - strip.begin,
                Matrix<T>{left + strip.begin * height + strip.from, 1, height},
                Matrix<T>{right + strip.begin * width, width, 1},
                to + (strip.group * height + strip.from) * width, width,
                spare + multiply_scratch<Tile, S>(m), spare, after, strip.past);
  if (strip.past) finish_past_cache();
}

template <typename Tile, typename T>
FfnBlocks blocks_for() {
  return {scratch_bytes<Tile, T>,  act_bytes<T>,
          first_step<Tile, T>,     second_step<Tile, T>,
          backward_first<Tile, T>, backward_second<Tile, T>,
          weight_strip<Tile, T>};
}

template <typename Tile>
FfnBlocks blocks_for(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return blocks_for<Tile, double>();
    case DType::kFloat16:
      return blocks_for<Tile, Float16>();
    case DType::kBFloat16:
      return blocks_for<Tile, BFloat16>();
    default:
      return blocks_for<Tile, float>();
  }
}

}  // namespace

FfnBlocks HETERPS_NAMED(ffn_blocks)(DType dtype) {
  return blocks_for<Tiling<HETERPS_TILING>>(dtype);
}

}  // namespace heterps
