#include <stdexcept>

#include "check.cuh"
#include "heterps/quantize.cuh"
#include "heterps/quantize.h"

namespace heterps {

void quantize_rows_cuda(int64_t rows, int64_t dim, const float* x, int8_t* q, float* scale,
                        void* stream) {
  if (rows == 0) return;
  const RowThreads threads = row_threads(rows, 32, "quantize_rows");
  quantize_rows_kernel<<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows, dim, x, q, scale);
  check_cuda(cudaGetLastError(), "quantize_rows");
}

void dequantize_rows_cuda(int64_t rows, int64_t dim, const int8_t* q, const float* scale, float* x,
                          void* stream) {
  if (rows == 0 || dim == 0) return;
  const RowThreads threads = row_threads(rows, dim, "dequantize_rows");
  dequantize_rows_kernel<<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      threads.bits, rows, dim, q, scale, x);
  check_cuda(cudaGetLastError(), "dequantize_rows");
}

}  // namespace heterps
