#include "row/optimizer_rules.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "bindings/platform.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 12;   // rows prefetched ahead of the one in work
constexpr size_t kReach = 512;  // floats of a row prefetched; the hardware follows from there
constexpr uintptr_t kLine = 64;

inline void PrefetchFloats(const void* floats, size_t width) {
  const auto begin = reinterpret_cast<uintptr_t>(floats);
  const uintptr_t end = begin + std::min(width, kReach) * sizeof(float);
  for (uintptr_t at = begin & ~(kLine - 1); at < end; at += kLine) {
    Prefetch(reinterpret_cast<const void*>(at));
  }
}

// Gradients too: they come in the order of the rows, which is not that of the batch.
inline void PrefetchRow(const RowBatch& rows, size_t i, size_t state_width) {
  if (i >= rows.n) return;
  PrefetchFloats(rows.weights[i], rows.dim);
  if (state_width > 0) PrefetchFloats(rows.states[i], state_width);
  PrefetchFloats(rows.grads[i], rows.dim);
}

// Its type is to be written out: `auto` would drop the alignment.
inline const UnalignedFloat* Gradient(const RowBatch& rows, size_t i) {
  return static_cast<const UnalignedFloat*>(rows.grads[i]);
}

HETERPS_CLONES
void Sgd(RowBatch rows, float rate, float decay) {
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, 0);
    float* __restrict w = rows.weights[i];
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    for (size_t j = 0; j < rows.dim; ++j) w[j] -= rate * (g[j] + decay * w[j]);
  }
}

HETERPS_CLONES
void Momentum(RowBatch rows, float rate, float decay, float momentum) {
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, rows.dim);
    float* __restrict w = rows.weights[i];
    float* __restrict velocity = rows.states[i];
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    for (size_t j = 0; j < rows.dim; ++j) {
      velocity[j] = momentum * velocity[j] + (g[j] + decay * w[j]);
      w[j] -= rate * velocity[j];
    }
  }
}

// The quotient first, so that an infinite sum gives 0 whatever the rate.
HETERPS_CLONES
void Adagrad(RowBatch rows, float rate, float decay, float epsilon) {
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, rows.dim);
    float* __restrict w = rows.weights[i];
    float* __restrict sum = rows.states[i];
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    for (size_t j = 0; j < rows.dim; ++j) {
      const float d = g[j] + decay * w[j];
      sum[j] += d * d;
      w[j] -= rate * (d / (std::sqrt(sum[j]) + epsilon));
    }
  }
}

// Sums in lanes of a fixed number, so that vectors of any length add in the same order.
HETERPS_CLONES
void RowwiseAdagrad(RowBatch rows, float rate, float decay, float epsilon) {
  constexpr size_t kLanes = 8;
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, 1);
    float* __restrict w = rows.weights[i];
    float* __restrict sum = rows.states[i];
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    float lane[kLanes] = {};
    size_t j = 0;
    for (; j + kLanes <= rows.dim; j += kLanes) {
      for (size_t k = 0; k < kLanes; ++k) {
        const float d = g[j + k] + decay * w[j + k];
        lane[k] += d * d;
      }
    }
    for (size_t k = 0; j + k < rows.dim; ++k) {
      const float d = g[j + k] + decay * w[j + k];
      lane[k] += d * d;
    }
    const float squares =
        ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
    *sum += squares / static_cast<float>(rows.dim);
    const float inverse = 1.0f / (std::sqrt(*sum) + epsilon);
    for (j = 0; j < rows.dim; ++j) w[j] -= rate * (inverse * (g[j] + decay * w[j]));
  }
}

// A gradient whose square is a float: beyond 2^63 it counts as 2^63. An infinite accumulator would
// stop an Adam row for good, or make it NaN.
inline float Squarable(float d) {
  constexpr float kLargest = 0x1p63f;
  return std::min(std::max(d, -kLargest), kLargest);
}

template <bool kAmsgrad, bool kApart>
__attribute__((always_inline)) inline void AdamRows(const RowBatch& rows, float rate, float decay,
                                                    const Optimizer& o) {
  const size_t dim = rows.dim;
  const size_t width = (kAmsgrad ? 3 : 2) * dim + 1;
  const auto b1 = static_cast<float>(o.beta1);
  const auto b2 = static_cast<float>(o.beta2);
  const auto c1 = static_cast<float>(1 - o.beta1);
  const auto c2 = static_cast<float>(1 - o.beta2);
  const float epsilon = o.epsilon;
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, width);
    float* __restrict w = rows.weights[i];
    float* __restrict m = rows.states[i];
    float* __restrict v = rows.states[i] + dim;
    float* __restrict peak = rows.states[i] + 2 * dim;  // amsgrad
    float* step = rows.states[i] + width - 1;
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    // Each row counts its own steps; float32 counts to 2^24, long after the correction is 1.
    const auto t = static_cast<size_t>(*step);
    if (*step < 0x1p24f) *step += 1;
    const float first = t < o.correction1.size() ? o.correction1[t] : 1.0f;
    const float second = t < o.correction2.size() ? o.correction2[t] : 1.0f;
    const float size = rate / first;
    const float root = 1.0f / std::sqrt(second);
    for (size_t j = 0; j < dim; ++j) {
      const float d = Squarable(kApart ? g[j] : g[j] + decay * w[j]);
      m[j] = b1 * m[j] + c1 * d;
      v[j] = b2 * v[j] + c2 * d * d;
      float square = v[j];
      if constexpr (kAmsgrad) square = peak[j] = std::max(peak[j], square);
      if constexpr (kApart) w[j] -= rate * decay * w[j];
      w[j] -= size * (m[j] / (std::sqrt(square) * root + epsilon));
    }
  }
}

HETERPS_CLONES
void Adam(RowBatch rows, float rate, float decay, const Optimizer& o) {
  AdamRows<false, false>(rows, rate, decay, o);
}

HETERPS_CLONES
void AdamW(RowBatch rows, float rate, float decay, const Optimizer& o) {
  AdamRows<false, true>(rows, rate, decay, o);
}

HETERPS_CLONES
void Amsgrad(RowBatch rows, float rate, float decay, const Optimizer& o) {
  AdamRows<true, false>(rows, rate, decay, o);
}

HETERPS_CLONES
void AmsgradW(RowBatch rows, float rate, float decay, const Optimizer& o) {
  AdamRows<true, true>(rows, rate, decay, o);
}

// FTRL-Proximal with z, l1 and l2 multiplied by the learning rate, which then divides nothing and
// may be 0. A schedule scales the gradients that enter z: scaling the learning rate in the closed
// form would scale all weights with it.
HETERPS_CLONES
void Ftrl(RowBatch rows, float rate, float decay, float l1, float l2, float beta) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (size_t i = 0; i < rows.n; ++i) {
    PrefetchRow(rows, i + kAhead, 2 * rows.dim);
    float* __restrict w = rows.weights[i];
    float* __restrict sum = rows.states[i];
    float* __restrict z = rows.states[i] + rows.dim;
    const UnalignedFloat* __restrict g = Gradient(rows, i);
    for (size_t j = 0; j < rows.dim; ++j) {
      const float d = Squarable(g[j] + decay * w[j]);
      const float before = std::sqrt(sum[j]);
      sum[j] = std::min(sum[j] + d * d, kLargest);
      const float root = std::sqrt(sum[j]);
      z[j] += rate * d - (root - before) * w[j];
      const float solved = (std::copysign(l1, z[j]) - z[j]) / (beta + root + l2);
      w[j] = std::abs(z[j]) > l1 ? solved : 0.0f;
    }
  }
}

}  // namespace

void Step(const Optimizer& o, const RowBatch& rows, float rate, float decay) {
  const size_t state_width = o.StateWidth(rows.dim);
  for (size_t i = 0; i < kAhead; ++i) PrefetchRow(rows, i, state_width);
  switch (o.kind) {
    case Optimizer::Kind::kSgd:
      return Sgd(rows, rate, decay);
    case Optimizer::Kind::kMomentum:
      return Momentum(rows, rate, decay, o.momentum);
    case Optimizer::Kind::kAdagrad:
      return Adagrad(rows, rate, decay, o.epsilon);
    case Optimizer::Kind::kRowwiseAdagrad:
      return RowwiseAdagrad(rows, rate, decay, o.epsilon);
    case Optimizer::Kind::kAdam:
      return o.amsgrad ? Amsgrad(rows, rate, decay, o) : Adam(rows, rate, decay, o);
    case Optimizer::Kind::kAdamW:
      return o.amsgrad ? AmsgradW(rows, rate, decay, o) : AdamW(rows, rate, decay, o);
    case Optimizer::Kind::kFtrl:
      return Ftrl(rows, rate, decay, o.learning_rate * o.l1, o.learning_rate * o.l2, o.beta);
  }
}

}  // namespace heterps::ps
