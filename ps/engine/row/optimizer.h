// Row-wise optimizers: a row's weights and its state, both float32, stepped by one gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heterps::ps {

struct Optimizer {
  // The numbers are in checkpoints; never change them.
  enum class Kind : uint32_t {
    kSgd = 0,
    kMomentum = 1,        // state: velocity[dim]
    kAdagrad = 2,         // state: sum of squares[dim]
    kRowwiseAdagrad = 3,  // state: sum of the squares' means[1]
    kAdam = 4,   // state: mean[dim], mean of squares[dim], its peak[dim] (amsgrad), steps[1]
    kFtrl = 5,   // state: sum of squares[dim], learning_rate * z[dim]
    kAdamW = 6,  // state: as of kAdam
  };
  Kind kind = Kind::kSgd;
  float learning_rate = 0;
  float epsilon = 0;  // outside the root
  double beta1 = 0;
  double beta2 = 0;
  // Times the weights, added to the gradient, as in torch.optim; kAdamW: to the step.
  float weight_decay = 0;
  float initial_accumulator = 0;
  float momentum = 0;
  float l1 = 0;  // ftrl: l1, l2 and beta as in McMahan et al. (2013)
  float l2 = 0;
  float beta = 0;
  bool amsgrad = false;
  float clip_norm = 0;       // largest L2 norm of a row's gradient; 0: any
  float bound = 0;           // largest magnitude of a weight; 0: any
  bool trust_ratio = false;  // LAMB: a step's norm is learning_rate * |weights|; not with ftrl
  // Adam: 1 - beta^t for t = 1.. until it no longer differs from 1 in float32.
  std::vector<float> correction1, correction2;

  bool adam() const { return kind == Kind::kAdam || kind == Kind::kAdamW; }
  void Prepare();                                  // once, after the fields are set
  size_t StateWidth(size_t dim) const;             // floats
  void InitState(size_t dim, float* state) const;  // 4-byte aligned

  // Applies the `dim` floats at grads[i], of any alignment, to weights[i] with states[i] (4-byte
  // aligned). Rows must be distinct; `rate` multiplies the learning rate. `states` is not read
  // where StateWidth is 0.
  void Apply(float* const* weights, float* const* states, const void* const* grads, size_t n,
             size_t dim, float rate) const;
};

}  // namespace heterps::ps
