// Activations of the feed-forward networks and their derivatives, for the CPU twins.
//
// float goes through polynomials without branches, which become vector instructions and stay within
// 1e-6 of the exact value; double through the library, for gradient checks.
#pragma once

#include <cmath>
#include <cstdint>

#include "gemm.h"
#include "heterps/grouped_ffn.h"

namespace heterps {
namespace {

// After Cephes' expf: x = n ln 2 + r, e^r by a polynomial, 2^n by the exponent's bits. It ends at
// e^-87 and e^60.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 60.0f ? 60.0f : x;
  const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounds
  const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  return p * bits::to_float(static_cast<uint32_t>(exponent));
}
inline double exponential(double x) { return std::exp(x); }

// The normal distribution: its density at x, and the probability below x.
template <typename S>
struct Normal {
  S density;
  S below;
};

// Abramowitz and Stegun 7.1.26: erfc(z) = polynomial(1 / (1 + pz)) e^(-z^2), within 1.5e-7.
inline Normal<float> normal(float x) {
  const float z = std::fabs(x) * 0.70710678118654752f;
  const float bell = exponential(-z * z);
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = 0.5f * p * t * bell;
  return {0.39894228040143268f * bell, x < 0 ? tail : 1.0f - tail};
}
inline Normal<double> normal(double x) {
  return {0.39894228040143267794 * std::exp(-0.5 * x * x),
          0.5 * std::erfc(-x * 0.70710678118654752440)};
}

// Of float 0 below -60. What a limit of exponential() gives a compiler computes beforehand and
// multiplies all lanes by: of one that is denormal, some processors take ten times as long.
inline float logistic(float x) { return x < -60.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }
inline double logistic(double x) { return 1.0 / (1.0 + exponential(-x)); }

// out[h] = activate(pre) of `hidden` units; those of SwiGLU have their values `value` behind gates.
template <typename P, typename S>
inline void activate(Activation kind, int64_t hidden, const P* __restrict pre, int64_t value,
                     S* __restrict out) {
  switch (kind) {
    case Activation::kGelu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        out[h] = x * normal(x).below;
      }
      return;
    case Activation::kRelu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        out[h] = x < 0 ? S{0} : x;  // NaN stays
      }
      return;
    case Activation::kSilu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        out[h] = x * logistic(x);
      }
      return;
    case Activation::kSwiglu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        out[h] = x * logistic(x) * static_cast<S>(pre[value + h]);
      }
      return;
  }
}

// From the gradient of what activate() gives: the gradient of pre, and that output once more.
template <typename P, typename S>
inline void activate_backward(Activation kind, int64_t hidden, const P* __restrict pre,
                              int64_t value, const S* __restrict grad, P* __restrict grad_pre,
                              P* __restrict out) {
  switch (kind) {
    case Activation::kGelu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        const Normal<S> at = normal(x);
        out[h] = static_cast<P>(x * at.below);
        grad_pre[h] = static_cast<P>(grad[h] * (at.below + x * at.density));
      }
      return;
    case Activation::kRelu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        out[h] = static_cast<P>(x < 0 ? S{0} : x);
        grad_pre[h] = static_cast<P>(x > 0 ? grad[h] : S{0});
      }
      return;
    case Activation::kSilu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]);
        const S gate = logistic(x);
        out[h] = static_cast<P>(x * gate);
        grad_pre[h] = static_cast<P>(grad[h] * gate * (S{1} + x * (S{1} - gate)));
      }
      return;
    case Activation::kSwiglu:
      for (int64_t h = 0; h < hidden; ++h) {
        const S x = static_cast<S>(pre[h]), up = static_cast<S>(pre[value + h]);
        const S gate = logistic(x), silu = x * gate;
        out[h] = static_cast<P>(silu * up);
        grad_pre[h] = static_cast<P>(grad[h] * up * gate * (S{1} + x * (S{1} - gate)));
        grad_pre[value + h] = static_cast<P>(grad[h] * silu);
      }
      return;
  }
}

}  // namespace
}  // namespace heterps
