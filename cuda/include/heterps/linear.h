// The three products of a linear layer, on a CPU, in float32:
//
//   y = x weight^T + bias,  grad_x = grad weight,  grad_weight = grad^T x
//
// A sum runs in a fixed order, whatever the number of threads; of y for few rows or few outputs in
// another one.
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
                        const float* bias, float* y, int threads);

// `add`: to what is there.
void linear_grad_input_cpu(const LinearShape& shape, const float* grad, const float* weight,
                           float* grad_x, bool add, int threads);

void linear_grad_weight_cpu(const LinearShape& shape, const float* grad, const float* x,
                            float* grad_weight, int threads);

}  // namespace heterps
