// The activations of grouped_ffn and their derivatives, in the type of sums.
#pragma once

#include "heterps/grouped_ffn.h"

namespace heterps {

template <typename S>
__device__ S logistic(S x) {
  return S{1} / (S{1} + exp(-x));
}
template <typename S>
__device__ S below_normal(S x) {
  return S(0.5) * erfc(-x * S(0.70710678118654752440));
}
template <typename S>
__device__ S normal_density(S x) {
  return S(0.39894228040143267794) * exp(S(-0.5) * x * x);
}

// `value` is that of SwiGLU.
template <typename S>
__device__ S activated(Activation kind, S x, S value) {
  switch (kind) {
    case Activation::kGelu:
      return x * below_normal(x);
    case Activation::kRelu:
      return x < S{0} ? S{0} : x;
    case Activation::kSilu:
      return x * logistic(x);
    default:
      return x * logistic(x) * value;
  }
}

// The derivative by x.
template <typename S>
__device__ S slope(Activation kind, S x, S value) {
  const S gate = logistic(x);
  const S silu = gate * (S{1} + x * (S{1} - gate));
  switch (kind) {
    case Activation::kGelu:
      return below_normal(x) + x * normal_density(x);
    case Activation::kRelu:
      return x > S{0} ? S{1} : S{0};
    case Activation::kSilu:
      return silu;
    default:
      return silu * value;
  }
}

}  // namespace heterps
