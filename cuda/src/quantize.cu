#include <stdexcept>

#include "check.cuh"
#include "heterps/quantize.cuh"
#include "heterps/quantize.h"

namespace heterps {
namespace {

unsigned blocks_of(int64_t threads) {
  const int64_t blocks = (threads + kQuantizeThreads - 1) / kQuantizeThreads;
  if (blocks > INT32_MAX) throw std::runtime_error("quantize: too many elements for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void quantize_rows_cuda(int64_t rows, int64_t dim, const float* x, int8_t* q, float* scale,
                        void* stream) {
  if (rows == 0) return;
  quantize_rows_kernel<<<blocks_of(rows * 32), kQuantizeThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(rows, dim, x, q, scale);
  check_cuda(cudaGetLastError(), "quantize_rows");
}

void dequantize_rows_cuda(int64_t rows, int64_t dim, const int8_t* q, const float* scale, float* x,
                          void* stream) {
  if (rows == 0 || dim == 0) return;
  dequantize_rows_kernel<<<blocks_of(rows * dim), kQuantizeThreads, 0,
                           static_cast<cudaStream_t>(stream)>>>(rows, dim, q, scale, x);
  check_cuda(cudaGetLastError(), "dequantize_rows");
}

}  // namespace heterps
