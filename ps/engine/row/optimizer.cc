#include "row/optimizer.h"

#include <algorithm>
#include <cmath>

#include "bindings/platform.h"
#include "row/optimizer_rules.h"

namespace heterps::ps {
namespace {

// Least epsilon, and least beta of ftrl. The square of a smaller gradient is 0 in float32, so that
// without it such a gradient, or a gradient of 0, would be divided by 0.
constexpr float kLeastEpsilon = 0x1p-75f;

std::vector<float> Corrections(double beta) {
  std::vector<float> out;
  double power = beta;
  while (power > 0x1p-26 && out.size() < (1u << 20)) {
    out.push_back(static_cast<float>(1 - power));
    power *= beta;
  }
  return out;
}

// L2 norm; in double, where no float32 overflows or vanishes when squared.
double Norm(const UnalignedFloat* values, size_t dim) {
  double sum = 0;
  for (size_t j = 0; j < dim; ++j) sum += static_cast<double>(values[j]) * values[j];
  return std::sqrt(sum);
}

// Copies a gradient, made no longer than `longest` (0: as it is).
void Clip(const UnalignedFloat* grad, size_t dim, double longest, float* out) {
  const double norm = longest > 0 ? Norm(grad, dim) : 0;
  const double scale = norm > longest ? longest / norm : 1;
  for (size_t j = 0; j < dim; ++j) out[j] = static_cast<float>(grad[j] * scale);
}

// Adds the step, found for a learning rate of 1, with the norm that LAMB gives it.
void AddTrusted(const float* step, size_t dim, double rate, float* weights) {
  const double length = Norm(step, dim);
  const double weight = Norm(weights, dim);
  const double scale = length > 0 && weight > 0 ? rate * (weight / length) : rate;
  for (size_t j = 0; j < dim; ++j) {
    weights[j] = static_cast<float>(weights[j] + scale * step[j]);
  }
}

// Clipping, trust ratio and bound, in chunks that stay in the nearest cache. With a trust ratio the
// step is taken from zero weights in scratch, which loses no digits to their size.
void StepGuarded(const Optimizer& o, const RowBatch& rows, float rate) {
  const size_t dim = rows.dim;
  const bool trusted = o.trust_ratio && o.kind != Optimizer::Kind::kFtrl;
  const size_t chunk = std::min(rows.n, std::clamp<size_t>(2048 / dim, 1, 64));
  std::vector<float> grads(chunk * dim), steps(trusted ? chunk * dim : 0);
  std::vector<const void*> grad_rows(chunk);
  std::vector<float*> step_rows(trusted ? chunk : 0);
  for (size_t k = 0; k < chunk; ++k) grad_rows[k] = &grads[k * dim];
  for (size_t k = 0; k < step_rows.size(); ++k) step_rows[k] = &steps[k * dim];

  for (size_t begin = 0; begin < rows.n; begin += chunk) {
    const size_t count = std::min(chunk, rows.n - begin);
    float* const* weights = rows.weights + begin;
    float* const* states = rows.states == nullptr ? nullptr : rows.states + begin;
    for (size_t k = 0; k < count; ++k) {
      Prefetch(weights[k]);
      if (begin + k + 8 < rows.n) Prefetch(rows.grads[begin + k + 8]);
      Clip(static_cast<const UnalignedFloat*>(rows.grads[begin + k]), dim, o.clip_norm,
           &grads[k * dim]);
    }
    if (trusted) {
      std::fill(steps.begin(), steps.end(), 0.0f);
      const bool apart = o.kind == Optimizer::Kind::kAdamW;
      const auto decay = [&](std::vector<float>* to, float by) {
        for (size_t k = 0; k < count; ++k) {
          for (size_t j = 0; j < dim; ++j) (*to)[k * dim + j] += by * weights[k][j];
        }
      };
      if (!apart) decay(&grads, o.weight_decay);
      Step(o, {step_rows.data(), states, grad_rows.data(), count, dim}, 1.0f, 0.0f);
      if (apart) decay(&steps, -o.weight_decay);
      for (size_t k = 0; k < count; ++k) AddTrusted(step_rows[k], dim, rate, weights[k]);
    } else {
      Step(o, {weights, states, grad_rows.data(), count, dim}, rate, o.weight_decay);
    }
    if (o.bound > 0) {
      for (size_t k = 0; k < count; ++k) {
        for (size_t j = 0; j < dim; ++j)
          weights[k][j] = std::clamp(weights[k][j], -o.bound, o.bound);
      }
    }
  }
}

}  // namespace

void Optimizer::Prepare() {
  epsilon = std::max(epsilon, kLeastEpsilon);
  beta = std::max(beta, kLeastEpsilon);
  if (!adam()) return;
  correction1 = Corrections(beta1);
  correction2 = Corrections(beta2);
}

size_t Optimizer::StateWidth(size_t dim) const {
  switch (kind) {
    case Kind::kSgd:
      return 0;
    case Kind::kMomentum:
    case Kind::kAdagrad:
      return dim;
    case Kind::kRowwiseAdagrad:
      return 1;
    case Kind::kAdam:
    case Kind::kAdamW:
      return (amsgrad ? 3 : 2) * dim + 1;
    case Kind::kFtrl:
      return 2 * dim;
  }
  return 0;
}

void Optimizer::InitState(size_t dim, float* state) const {
  std::fill_n(state, StateWidth(dim), 0.0f);
  if (kind == Kind::kAdagrad || kind == Kind::kFtrl) {
    std::fill_n(state, dim, initial_accumulator);
  } else if (kind == Kind::kRowwiseAdagrad) {
    *state = initial_accumulator;
  }
}

void Optimizer::Apply(float* const* weights, float* const* states, const void* const* grads,
                      size_t n, size_t dim, float rate) const {
  const RowBatch rows{weights, states, grads, n, dim};
  const float size = rate * learning_rate;
  if (clip_norm > 0 || bound > 0 || trust_ratio) {
    StepGuarded(*this, rows, size);
  } else {
    Step(*this, rows, size, weight_decay);
  }
}

}  // namespace heterps::ps
