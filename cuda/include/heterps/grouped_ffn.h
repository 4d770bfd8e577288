// Feed-forward networks of two layers, one for each group of consecutive rows:
//
//   out[r] = activate(rows[r] w1[e]) w2[e]     for offsets[e] <= r < offsets[e + 1]
//
// Groups may be empty. Nothing is padded. An element is summed in one fixed order: equal bits from
// run to run, and on a CPU for any number of threads.
#pragma once

#include <cstdint>

#include "heterps/dtype.h"

namespace heterps {

enum class Activation { kGelu, kRelu, kSilu, kSwiglu };

struct FfnShape {
  int64_t rows;
  int64_t groups;
  int64_t dim;     // D
  int64_t hidden;  // H
  Activation activation;

  // Width of what the first layer gives; of SwiGLU the gate and then the value.
  int64_t inner() const { return activation == Activation::kSwiglu ? 2 * hidden : hidden; }
};

// Where rows come from tokens: row r is x[order[r] / k], and the gradient of what it becomes is
// w[order[r]] times that of the token.
struct FfnTokens {
  int64_t tokens;
  int64_t k;
  const int64_t* order;  // [rows], below tokens * k
  const void* weights;   // [tokens, k], in the type of sums; of the backward alone
};

// All matrices are in C order; those that an op does not need may be null.
struct FfnArrays {
  const void* rows;        // [rows, D]
  const int64_t* offsets;  // [groups + 1]
  const void* w1;          // [groups, D, inner]
  const void* w2;          // [groups, H, D]
  void* pre;               // [rows, inner] before the activation; null, on a CPU: not kept
  void* act;               // [rows, H] after it: scratch, on a GPU
  void* out;               // [rows, D]
  // On a CPU, forward only: the matrices of group e begin places[e] * step bytes behind w1 and w2,
  // and rows of one with a negative place are left as they are. Null: groups lie side by side.
  const int64_t* places = nullptr;
  int64_t step = 0;
  void* workspace = nullptr;  // scratch on a GPU, see grouped_ffn_workspace; may be null
  // On a CPU: `rows`, and the gradient of `out`, are [tokens, D]. Null: they are [rows, D].
  const FfnTokens* tokens = nullptr;
};

struct FfnGradients {
  const void* out;  // [rows, D]
  void* pre;        // [rows, inner] scratch, on a GPU
  void* rows;       // [rows, D], null: not wanted
  void* w1;         // [groups, D, inner], null together with w2: not wanted
  void* w2;         // [groups, H, D]
  // Of the weights of tokens, where rows come from tokens: [tokens, k], of pairs that have a row,
  // by what the forward gave in FfnArrays::out, whose place `rows` may take. Null: not wanted.
  void* weights = nullptr;
};

// Throw std::out_of_range unless offsets ascend from 0 to `rows`, and for an `order` out of range.
void grouped_ffn_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays, int threads);
void grouped_ffn_backward_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                              const FfnGradients& gradients, int threads);

// Bytes of scratch with which the current GPU takes its fastest way, Hopper's; 0: there is none.
int64_t grouped_ffn_workspace(const FfnShape& shape, DType dtype);

// Enqueue on `stream` (a cudaStream_t); do not synchronise, do not check offsets.
void grouped_ffn_cuda(const FfnShape& shape, DType dtype, const FfnArrays& arrays, void* stream);
void grouped_ffn_backward_cuda(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                               const FfnGradients& gradients, void* stream);

}  // namespace heterps
