#include "heterps/routed_ffn.h"

#include <cstring>

#include "heterps/gather.h"

namespace heterps {
namespace {

GatherShape gather_shape(const FfnShape& shape, const FfnTokens& tokens) {
  return {tokens.tokens, shape.rows, tokens.k, shape.dim};
}

}  // namespace

void routed_ffn_cpu(const FfnShape& shape, DType dtype, const RoutedArrays& arrays, void* out,
                    int threads) {
  const FfnTokens& tokens = *arrays.ffn.tokens;
  grouped_ffn_cpu(shape, dtype, arrays.ffn, threads);
  gather_sum_cpu(gather_shape(shape, tokens), dtype, arrays.ffn.out, tokens.weights, arrays.inverse,
                 out, threads);
}

void routed_ffn_backward_cpu(const FfnShape& shape, DType dtype, const RoutedArrays& arrays,
                             const RoutedGradients& gradients, int threads) {
  const GatherShape gather = gather_shape(shape, *arrays.ffn.tokens);
  const int64_t pairs = gather.tokens * gather.k;
  if (gradients.ffn.weights != nullptr && gather.rows < pairs) {  // some were dropped
    std::memset(gradients.ffn.weights, 0, pairs * (dtype == DType::kFloat64 ? 8 : 4));
  }
  grouped_ffn_backward_cpu(shape, dtype, arrays.ffn, gradients.ffn, threads);
  if (gradients.x != nullptr) {
    gather_sum_cpu(gather, dtype, gradients.ffn.rows, nullptr, arrays.inverse, gradients.x,
                   threads);
  }
}

}  // namespace heterps
