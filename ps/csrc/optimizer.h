// Row-wise optimizers. A row is [weights: dim][state: StateWidth] float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heterps::ps {

struct Optimizer {
  enum class Kind : uint32_t { kSgd = 0, kAdagrad = 1, kAdam = 2 };
  Kind kind = Kind::kSgd;
  float learning_rate = 0;
  float epsilon = 0;
  double beta1 = 0;
  double beta2 = 0;
  float weight_decay = 0;  // added to the gradient, as in torch.optim
  float initial_accumulator = 0;
  // Adam: 1 - beta^t for t = 1.. until it no longer differs from 1 in float32.
  std::vector<float> correction1, correction2;

  void Prepare();  // once, after the fields are set
  size_t StateWidth(size_t dim) const;
  void InitState(size_t dim, float* state) const;

  // Applies the `dim` floats at grads[i], of any alignment, to rows[i]. Rows must be distinct.
  void Apply(float* const* rows, const void* const* grads, size_t n, size_t dim) const;
};

}  // namespace heterps::ps
