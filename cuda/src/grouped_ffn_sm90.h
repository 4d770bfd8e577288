// grouped_ffn by the grouped products of Hopper, with the steps between them on their own.
#pragma once

#include "heterps/grouped_ffn.h"

namespace heterps {

// Whether these arrays can take that way: they have scratch for it, and begin at multiples of 16
// bytes.
bool takes_sm90(const FfnArrays& arrays, const FfnGradients* gradients);

void grouped_ffn_sm90(const FfnShape& shape, DType dtype, const FfnArrays& arrays, void* stream);
void grouped_ffn_backward_sm90(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                               const FfnGradients& gradients, void* stream);

}  // namespace heterps
