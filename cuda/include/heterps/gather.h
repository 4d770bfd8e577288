// Moving rows into expert order and back. Three ops, each the derivative of the other two:
//
//   gather_rows: rows[p]    = w[order[p]] * x[order[p] / k]
//   gather_sum:  x[t]       = sum_j w[t, j] * rows[inverse[t, j]]
//   gather_dot:  w[t, j]    = <x[t], rows[inverse[t, j]]>
//
// Every output element is written once, by one thread, summing in a fixed order: no atomics, equal
// bits from run to run. A negative `inverse` marks a dropped pair: it contributes zero.
#pragma once

#include <cstdint>

#include "heterps/dtype.h"

namespace heterps {

struct GatherShape {
  int64_t tokens;  // rows of x
  int64_t rows;    // rows in expert order, at most tokens * k
  int64_t k;
  int64_t dim;
};

// `w` is [tokens, k], or null for all ones: float32, or float64 with float64 rows.
// The CPU twins throw std::out_of_range for an index out of range.
void gather_rows_cpu(const GatherShape& shape, DType dtype, const void* x, const void* w,
                     const int64_t* order, void* rows, int threads);
void gather_sum_cpu(const GatherShape& shape, DType dtype, const void* rows, const void* w,
                    const int64_t* inverse, void* x, int threads);
void gather_dot_cpu(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                    const int64_t* inverse, void* w, int threads);

// gather_dot of these rows alone, which need not be all: it writes no other element of `w`.
void rows_dot_cpu(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                  const int64_t* order, void* w, int threads);

// Enqueue on `stream` (a cudaStream_t); do not synchronise, do not check indices. The rows of
// gather_rows are found by the inverse of `order`, which has each of them once.
void gather_rows_cuda(const GatherShape& shape, DType dtype, const void* x, const void* w,
                      const int64_t* inverse, void* rows, void* stream);
void gather_sum_cuda(const GatherShape& shape, DType dtype, const void* rows, const void* w,
                     const int64_t* inverse, void* x, void* stream);
void gather_dot_cuda(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                     const int64_t* inverse, void* w, void* stream);

}  // namespace heterps
