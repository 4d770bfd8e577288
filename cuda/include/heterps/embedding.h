// Pooled look-ups of embedding rows, and what their backward needs: no gradient of the size of the
// table ever exists. Ids are sorted; equal ones form a segment, whose gradients are summed in the
// order of the ids by one owner. No atomics: equal bits from run to run.
#pragma once

#include <cstdint>

#include "heterps/dtype.h"

namespace heterps {

struct PoolShape {
  int64_t rows;  // of the table
  int64_t dim;
  int64_t ids;
  int64_t bags;
};

// An id's contribution to its bag is scale[i] * table[ids[i]]; scale null: 1. float32, or float64
// with rows of float64.
struct PoolInputs {
  const int64_t* ids;      // [ids]
  const int64_t* offsets;  // [bags + 1], bag b owns ids offsets[b] to offsets[b + 1]
  const void* scale;       // [ids]
};

// The ids sorted, stably, and where each came from.
struct SegmentInputs {
  const int64_t* sorted;  // [ids]
  const int64_t* source;  // [ids] sorted[p] == ids[source[p]]
  const int64_t* bag;     // [ids] of ids[i]
  const void* scale;      // [ids] as above
  const void* grad;       // [bags, dim]
};

enum class RowRule { kSgd, kAdagrad, kRowwiseAdagrad };

// Adagrad: s += g^2, w -= rate * g / (sqrt(s) + epsilon); row-wise with one s, += mean(g^2).
struct RowOptimizer {
  RowRule rule;
  double rate;
  double epsilon;
};

// `state`: null of SGD, [rows, dim] of Adagrad, [rows] row-wise; float32 or float64 as scale is.
// The CPU twins throw std::out_of_range for ids, bags and offsets that are out of range.
void embedding_pool_cpu(const PoolShape& shape, DType dtype, const PoolInputs& in,
                        const void* table, void* out, int threads);
// rows[p] = the sum of a segment where it begins, zero inside it.
void embedding_segments_cpu(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                            void* rows, int threads);
void embedding_update_cpu(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                          const RowOptimizer& optimizer, void* table, void* state, int threads);

// Enqueue on `stream` (a cudaStream_t); do not synchronise, do not check indices.
void embedding_pool_cuda(const PoolShape& shape, DType dtype, const PoolInputs& in,
                         const void* table, void* out, void* stream);
void embedding_segments_cuda(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                             void* rows, void* stream);
void embedding_update_cuda(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                           const RowOptimizer& optimizer, void* table, void* state, void* stream);

}  // namespace heterps
