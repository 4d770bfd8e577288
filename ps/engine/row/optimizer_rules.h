// The update rules themselves, over many rows: the loops that the engine spends its time in.
#pragma once

#include <cstddef>

#include "row/optimizer.h"

namespace heterps::ps {

struct RowBatch {
  float* const* weights;
  float* const* states;
  const void* const* grads;
  size_t n;
  size_t dim;
};

// One step of o.kind with step size `rate` (the learning rate, scheduled) and weight decay `decay`;
// clip_norm, bound and trust_ratio are not looked at. No finite gradient makes a NaN of a finite
// row: where a sum of squares overflows, the steps of adagrad and rowwise_adagrad become 0; adam
// and ftrl take a gradient beyond 2^63 as 2^63.
void Step(const Optimizer& o, const RowBatch& rows, float rate, float decay);

}  // namespace heterps::ps
