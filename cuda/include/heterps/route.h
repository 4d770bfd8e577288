// Routing of tokens to experts: top-k choice and stable counting sort into expert order.
//
// A pair is (token, choice); its flat index is token * k + choice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps {

// The experts of each token.
struct Choice {
  const float* logits;  // [tokens, experts]
  int64_t tokens;
  int64_t experts;  // at least k, at most INT32_MAX
  int64_t k;        // at least 1
  int32_t* chosen;  // [tokens, k] best first; equal logits: lower expert first; NaN counts as -inf
};

// The weights of each token's experts: a softmax over the logits that it chose.
struct Weighing {
  const int32_t* chosen;  // [tokens, k], each from 0 to experts - 1 and once in a token
  int64_t tokens;
  int64_t experts;
  int64_t k;
};

// The pairs in the order of their experts.
struct Grouping {
  const int32_t* chosen;  // [pairs], each from 0 to experts - 1
  int64_t pairs;
  int64_t experts;   // from 1 to INT32_MAX
  int64_t* order;    // [pairs] flat indices grouped by expert, ascending inside each
  int64_t* inverse;  // [pairs] order[inverse[i]] == i
  int64_t* offsets;  // [experts + 1] expert e owns order[offsets[e] : offsets[e + 1]]
};

void choose_cpu(const Choice& choice, int threads);
// These three throw std::out_of_range for an expert that there is not.
void group_cpu(const Grouping& grouping);
// weights[tokens, k] of logits[tokens, experts].
void weigh_cpu(const Weighing& weighing, const float* logits, float* weights, int threads);
// gradient[tokens, experts] of the logits, `grad` being that of the weights.
void weigh_backward_cpu(const Weighing& weighing, const float* weights, const float* grad,
                        float* gradient, int threads);

// int64 elements of scratch device memory that group_cuda needs.
int64_t group_workspace(int64_t pairs, int64_t experts);

// Enqueue on `stream` (a cudaStream_t); do not synchronise, do not check the experts. Throw
// std::runtime_error.
void choose_cuda(const Choice& choice, void* stream);
void group_cuda(const Grouping& grouping, int64_t* workspace, void* stream);

}  // namespace heterps
