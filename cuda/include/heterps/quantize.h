// Rows of float32 as int8 with one scale each, for the wire.
//
//   scale[r] = max |x[r]| / 127,  q[r] = x[r] / scale[r] to the nearest, halves to even
//
// A row of zeros, or too small for a scale, has scale 0; one with an infinity or NaN has scale NaN.
#pragma once

#include <cstdint>

namespace heterps {

void quantize_rows_cpu(int64_t rows, int64_t dim, const float* x, int8_t* q, float* scale,
                       int threads);
void dequantize_rows_cpu(int64_t rows, int64_t dim, const int8_t* q, const float* scale, float* x,
                         int threads);

// Enqueue on `stream` (a cudaStream_t); do not synchronise.
void quantize_rows_cuda(int64_t rows, int64_t dim, const float* x, int8_t* q, float* scale,
                        void* stream);
void dequantize_rows_cuda(int64_t rows, int64_t dim, const int8_t* q, const float* scale, float* x,
                          void* stream);

}  // namespace heterps
