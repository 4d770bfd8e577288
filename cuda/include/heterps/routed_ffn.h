// A mixture of experts from its router's choice to its output, on a CPU: gather_rows, grouped_ffn
// and gather_sum as one, to the bit, so that rows need not lie anywhere before they are computed:
//
//   out[t] = sum_j w[t, j] * ffn_e(x[t])     e being the group of row inverse[t, j]
#pragma once

#include <cstdint>

#include "heterps/grouped_ffn.h"

namespace heterps {

struct RoutedArrays {
  FfnArrays ffn;           // its `rows` are x, its `out` what each row becomes: [rows, D]
  const int64_t* inverse;  // [tokens, k], negative where a pair was dropped
};

struct RoutedGradients {
  FfnGradients ffn;  // its `out` is [tokens, D], its `rows` is scratch: null if x is null
  void* x;           // [tokens, D]; null: not wanted
};

// Both throw std::out_of_range for offsets, `order` or `inverse` out of range.
void routed_ffn_cpu(const FfnShape& shape, DType dtype, const RoutedArrays& arrays, void* out,
                    int threads);
void routed_ffn_backward_cpu(const FfnShape& shape, DType dtype, const RoutedArrays& arrays,
                             const RoutedGradients& gradients, int threads);

}  // namespace heterps
