#include "optimizer.h"

#include <algorithm>
#include <cmath>

#include "platform.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 8;  // rows prefetched ahead of the one in work

// A whole row, since the optimizer touches all of it.
inline void PrefetchRow(const float* row, size_t width) {
  for (size_t j = 0; j < width; j += 16) Prefetch(row + j);
}

HETERPS_CLONES
void Sgd(float* const* rows, const void* const* grads, size_t n, size_t dim, float rate,
         float decay) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) PrefetchRow(rows[i + kAhead], dim);
    float* __restrict w = rows[i];
    const auto* __restrict g = static_cast<const UnalignedFloat*>(grads[i]);
    for (size_t j = 0; j < dim; ++j) w[j] -= rate * (g[j] + decay * w[j]);
  }
}

HETERPS_CLONES
void Adagrad(float* const* rows, const void* const* grads, size_t n, size_t dim, float rate,
             float epsilon, float decay) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) PrefetchRow(rows[i + kAhead], 2 * dim);
    float* __restrict w = rows[i];
    float* __restrict sum = rows[i] + dim;
    const auto* __restrict g = static_cast<const UnalignedFloat*>(grads[i]);
    for (size_t j = 0; j < dim; ++j) {
      const float d = g[j] + decay * w[j];
      sum[j] += d * d;
      w[j] -= rate * d / (std::sqrt(sum[j]) + epsilon);
    }
  }
}

HETERPS_CLONES
void Adam(float* const* rows, const void* const* grads, size_t n, size_t dim, const Optimizer& o) {
  const auto b1 = static_cast<float>(o.beta1);
  const auto b2 = static_cast<float>(o.beta2);
  const auto c1 = static_cast<float>(1 - o.beta1);
  const auto c2 = static_cast<float>(1 - o.beta2);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) PrefetchRow(rows[i + kAhead], 3 * dim + 1);
    float* __restrict w = rows[i];
    float* __restrict m = rows[i] + dim;
    float* __restrict v = rows[i] + 2 * dim;
    float* step = rows[i] + 3 * dim;
    const auto* __restrict g = static_cast<const UnalignedFloat*>(grads[i]);
    // Each row counts its own steps; float32 counts to 2^24, long after the correction is 1.
    const auto t = static_cast<size_t>(*step);
    if (*step < 0x1p24f) *step += 1;
    const float first = t < o.correction1.size() ? o.correction1[t] : 1.0f;
    const float second = t < o.correction2.size() ? o.correction2[t] : 1.0f;
    const float rate = o.learning_rate / first;
    const float root = 1.0f / std::sqrt(second);
    for (size_t j = 0; j < dim; ++j) {
      const float d = g[j] + o.weight_decay * w[j];
      m[j] = b1 * m[j] + c1 * d;
      v[j] = b2 * v[j] + c2 * d * d;
      w[j] -= rate * m[j] / (std::sqrt(v[j]) * root + o.epsilon);
    }
  }
}

std::vector<float> Corrections(double beta) {
  std::vector<float> out;
  double power = beta;
  while (power > 0x1p-26 && out.size() < (1u << 20)) {
    out.push_back(static_cast<float>(1 - power));
    power *= beta;
  }
  return out;
}

}  // namespace

void Optimizer::Prepare() {
  if (kind != Kind::kAdam) return;
  correction1 = Corrections(beta1);
  correction2 = Corrections(beta2);
}

size_t Optimizer::StateWidth(size_t dim) const {
  switch (kind) {
    case Kind::kSgd:
      return 0;
    case Kind::kAdagrad:
      return dim;
    case Kind::kAdam:
      return 2 * dim + 1;
  }
  return 0;
}

void Optimizer::InitState(size_t dim, float* state) const {
  std::fill_n(state, StateWidth(dim), kind == Kind::kAdagrad ? initial_accumulator : 0.0f);
}

void Optimizer::Apply(float* const* rows, const void* const* grads, size_t n, size_t dim) const {
  switch (kind) {
    case Kind::kSgd:
      return Sgd(rows, grads, n, dim, learning_rate, weight_decay);
    case Kind::kAdagrad:
      return Adagrad(rows, grads, n, dim, learning_rate, epsilon, weight_decay);
    case Kind::kAdam:
      return Adam(rows, grads, n, dim, *this);
  }
}

}  // namespace heterps::ps
