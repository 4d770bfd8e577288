// The work on one block of rows; compiled once for each instruction set (see gemm.h for what that
// forbids here), which CMake gives as HETERPS_FFN_BLOCKS, the function's name, and HETERPS_TILING.
#include "grouped_ffn_blocks.h"

#include "activation.h"
#include "gemm.h"

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

// to[m, n] = a b, by way of `sums` unless that is what is summed in.
template <typename Tile, typename A, typename B, typename T, typename S>
inline void product(int64_t m, int64_t n, int64_t depth, const Matrix<A>& a, const Matrix<B>& b,
                    T* to, S* sums, S* spare) {
  if constexpr (std::is_same_v<T, S>) {
    (void)sums;
    multiply<Tile>(m, n, depth, a, b, to, n, spare);
  } else {
    multiply<Tile>(m, n, depth, a, b, sums, n, spare);
    convert(m * n, sums, to);
  }
}

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename Tile, typename T>
int64_t scratch_bytes(const FfnShape& shape, int64_t rows) {
  const int64_t elements = multiply_scratch<Tile, Sum<T>>(rows) +
                           rows * (larger(shape.dim, shape.inner()) + shape.hidden);
  return elements * static_cast<int64_t>(sizeof(Sum<T>));
}

template <typename Tile, typename T>
void forward_block(const FfnShape& shape, const FfnArrays& arrays, const Block& block,
                   void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, hidden = shape.hidden, inner = shape.inner();
  const int64_t m = block.end - block.begin;
  S* sums = spare + multiply_scratch<Tile, S>(m);
  S* act = sums + m * larger(dim, inner);
  T* kept = arrays.pre == nullptr ? nullptr : static_cast<T*>(arrays.pre) + block.begin * inner;
  S* pre = sums;
  if constexpr (std::is_same_v<T, S>) {
    if (kept != nullptr) pre = kept;
  }
  multiply<Tile>(m, inner, dim, Matrix<T>{in<T>(arrays.rows) + block.begin * dim, dim, 1},
                 Matrix<T>{of_group<T>(arrays, arrays.w1, block.group, dim * inner), inner, 1}, pre,
                 inner, spare);
  if constexpr (!std::is_same_v<T, S>) {
    if (kept != nullptr) convert(m * inner, pre, kept);
  }
  for (int64_t i = 0; i < m; ++i) {
    activate(shape.activation, hidden, pre + i * inner, act + i * hidden);
  }
  product<Tile>(m, dim, hidden, Matrix<S>{act, hidden, 1},
                Matrix<T>{of_group<T>(arrays, arrays.w2, block.group, hidden * dim), dim, 1},
                static_cast<T*>(arrays.out) + block.begin * dim, sums, spare);
}

// to[m, n] = a[m, depth] times the transpose of w[n, depth]; the same bits however a group is cut
// into blocks.
template <typename Tile, typename A, typename T, typename To, typename S>
inline void product_transposed(bool few, int64_t m, int64_t n, int64_t depth, const A* a,
                               const T* w, To* to, S* sums, S* spare) {
  if constexpr (std::is_same_v<A, S> && std::is_same_v<T, S> && std::is_same_v<To, S>) {
    if (few) {
      multiply_dots<Tile>(m, n, depth, a, depth, w, depth, to, n);
      return;
    }
  }
  product<Tile>(m, n, depth, Matrix<A>{a, depth, 1}, Matrix<T>{w, 1, depth}, to, sums, spare);
}

// The gradients of pre and rows, and the activations once more.
template <typename Tile, typename T>
void backward_block(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                    const Block& block, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  const int64_t dim = shape.dim, hidden = shape.hidden, inner = shape.inner();
  const int64_t m = block.end - block.begin;
  S* sums = spare + multiply_scratch<Tile, S>(m);
  S* grad_act = sums + m * larger(dim, inner);
  const bool few = arrays.offsets[block.group + 1] - arrays.offsets[block.group] <= kFew;
  product_transposed<Tile>(few, m, hidden, dim, in<T>(gradients.out) + block.begin * dim,
                           in<T>(arrays.w2) + block.group * hidden * dim, grad_act, sums, spare);
  T* grad_pre = static_cast<T*>(gradients.pre) + block.begin * inner;
  for (int64_t i = 0; i < m; ++i) {
    activate_backward(shape.activation, hidden, in<T>(arrays.pre) + (block.begin + i) * inner,
                      grad_act + i * hidden, grad_pre + i * inner,
                      static_cast<T*>(arrays.act) + (block.begin + i) * hidden);
  }
  if (gradients.rows == nullptr) return;
  product_transposed<Tile>(few, m, dim, inner, grad_pre,
                           in<T>(arrays.w1) + block.group * dim * inner,
                           static_cast<T*>(gradients.rows) + block.begin * dim, sums, spare);
}

template <typename Tile, typename T>
void weight_block(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                  bool second, const Block& block, void* memory) {
  using S = Sum<T>;
  S* spare = static_cast<S*>(memory);
  // The gradient [height, width] is left^T right; left is [rows, height] and right [rows, width].
  const int64_t height = second ? shape.hidden : shape.dim;
  const int64_t width = second ? shape.dim : shape.inner();
  const T* left = in<T>(second ? arrays.act : arrays.rows);
  const T* right = in<T>(second ? gradients.out : gradients.pre);
  T* to = static_cast<T*>(second ? gradients.w2 : gradients.w1);
  const int64_t m = block.end - block.begin, first = arrays.offsets[block.group];
  product<Tile>(m, width, arrays.offsets[block.group + 1] - first,
                Matrix<T>{left + first * height + block.begin, 1, height},
                Matrix<T>{right + first * width, width, 1},
                to + (block.group * height + block.begin) * width,
                spare + multiply_scratch<Tile, S>(m), spare);
}

template <typename Tile, typename T>
FfnBlocks blocks_for() {
  return {scratch_bytes<Tile, T>, forward_block<Tile, T>, backward_block<Tile, T>,
          weight_block<Tile, T>};
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

FfnBlocks HETERPS_FFN_BLOCKS(DType dtype) { return blocks_for<Tiling<HETERPS_TILING>>(dtype); }

}  // namespace heterps
