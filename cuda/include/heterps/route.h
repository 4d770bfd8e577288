// Routing of tokens to experts: top-k choice and stable counting sort into expert order.
//
// A pair is (token, choice); its flat index is token * k + choice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps {

struct RouteArgs {
  const float* logits;  // [tokens, experts]
  int64_t tokens;
  int64_t experts;   // at least k, at most INT32_MAX
  int64_t k;         // at least 1
  int32_t* chosen;   // [tokens, k] best first; equal logits: lower expert first; NaN counts as -inf
  int64_t* order;    // [tokens * k] flat indices grouped by expert, ascending inside each
  int64_t* inverse;  // [tokens * k] order[inverse[i]] == i
  int64_t* offsets;  // [experts + 1] expert e owns order[offsets[e] : offsets[e + 1]]
};

void route_cpu(const RouteArgs& args, int threads);

// int64 elements of scratch device memory that route_cuda needs.
int64_t route_workspace(int64_t pairs, int64_t experts);

// Enqueues on `stream` (a cudaStream_t); does not synchronise. Throws std::runtime_error.
void route_cuda(const RouteArgs& args, int64_t* workspace, void* stream);

}  // namespace heterps
