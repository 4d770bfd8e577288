// A router's logits and their gradients, on a CPU, in float32:
//
//   logits[t] = x[t] weight^T + bias
//
// A sum runs in a fixed order, whatever the number of threads; for few tokens or few experts in
// another one.
#pragma once

#include <cstdint>

namespace heterps {

struct RouterShape {
  int64_t tokens;
  int64_t dim;
  int64_t experts;
};

// x [tokens, dim], weight [experts, dim], bias [experts] or null.
void router_logits_cpu(const RouterShape& shape, const float* x, const float* weight,
                       const float* bias, float* logits, int threads);

struct RouterGradients {
  float* x;       // [tokens, dim], to which it is added; null: not wanted
  float* weight;  // [experts, dim]; null: not wanted
};

// `grad` [tokens, experts] is that of the logits.
void router_backward_cpu(const RouterShape& shape, const float* grad, const float* x,
                         const float* weight, const RouterGradients& gradients, int threads);

}  // namespace heterps
