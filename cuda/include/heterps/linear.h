// The three products of a linear layer, on a CPU, in float32:
//
//   y = x weight^T + bias, or that or 0 if it is less,  grad_x = grad weight,  grad_weight = grad^T
//   x
//
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

// rectified [rows, inputs] or null: what a ReLU gave, which x was; grad_x is that of its input
// then, 0 where it is not above 0. `add`: to what is there, and without `rectified`.
void linear_grad_input_cpu(const LinearShape& shape, const float* grad, const float* weight,
                           const float* rectified, float* grad_x, bool add, int threads);

void linear_grad_weight_cpu(const LinearShape& shape, const float* grad, const float* x,
                            float* grad_weight, int threads);

}  // namespace heterps
