// The three products of a linear layer, on a CPU, in float32:
//
//   y = x weight^T + bias,  grad_x = grad weight,  grad_weight = grad^T x
//
// and the ReLU behind it or before it, with them: y is 0 where it would be less, or grad_x is the
// gradient of what a ReLU made x of.
// A sum runs in a fixed order, whatever the number of threads; for few rows or columns in another
// one.
#pragma once

#include <cstdint>

namespace heterps {

// x [rows, inputs], weight [outputs, inputs], y and `grad` [rows, outputs].
struct LinearShape {
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
};

// bias [outputs] or null.
void linear_forward_cpu(const LinearShape& shape, const float* x, const float* weight,
                        const float* bias, bool relu, float* y, int threads);

// rectified [rows, inputs] or null: x, if a ReLU gave it; grad_x is 0 then where that is not above
// 0. `add`: to what is there, and without `rectified`.
void linear_grad_input_cpu(const LinearShape& shape, const float* grad, const float* weight,
                           const float* rectified, float* grad_x, bool add, int threads);

void linear_grad_weight_cpu(const LinearShape& shape, const float* grad, const float* x,
                            float* grad_weight, int threads);

}  // namespace heterps
