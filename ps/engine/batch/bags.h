// Bags of rows: what a client makes of the rows that it pulled, without a copy for each key.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps::ps {

enum class Pooling { kSum, kMean, kMax };

// Bags of `length` keys each, one after the other. Key i is row inverse[i], which must have been
// checked, unless `there` says 0 of it; null: all are there.
struct Bags {
  const int64_t* inverse;
  const uint8_t* there;
  size_t count;
  size_t length;
  size_t dim;
};

// out[b] of the rows [*, dim] of bag b; zeros where none is there. Of a maximum, which is the first
// of equal ones and NaN where one is, picked[b] are their rows, -1 where there is none.
void Pool(const Bags& bags, Pooling pooling, const float* rows, float* out, int32_t* picked);

// The gradient [rows, dim] of those rows, of the bags' gradients [count, dim], added in the order
// of the keys.
void PoolGradients(const Bags& bags, Pooling pooling, const float* grads, const int32_t* picked,
                   size_t rows, float* out);

}  // namespace heterps::ps
