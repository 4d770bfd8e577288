#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "check.cuh"
#include "heterps/embedding.cuh"

namespace heterps {
namespace {

// Calls `work` with a value of the element type and one of the type of its sums.
template <typename Work>
void dispatch(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return work(float{}, float{});
    case DType::kFloat64:
      return work(double{}, double{});
    case DType::kFloat16:
      return work(__half{}, float{});
    case DType::kBFloat16:
      return work(__nv_bfloat16{}, float{});
  }
  throw std::runtime_error("embedding: unknown dtype");
}

}  // namespace

void embedding_pool_cuda(const PoolShape& shape, DType dtype, const PoolInputs& in,
                         const void* table, void* out, void* stream) {
  if (shape.bags == 0 || shape.dim == 0) return;
  const RowThreads threads = row_threads(shape.bags, shape.dim, "embedding_pool");
  dispatch(dtype, [&](auto element, auto sum) {
    using T = decltype(element);
    embedding_pool_kernel<T, decltype(sum)>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            threads.bits, shape, in, static_cast<const T*>(table), static_cast<T*>(out));
  });
  check_cuda(cudaGetLastError(), "embedding_pool");
}

void embedding_segments_cuda(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                             void* rows, void* stream) {
  if (shape.ids == 0 || shape.dim == 0) return;
  const RowThreads threads = row_threads(shape.ids, shape.dim, "embedding_segments");
  dispatch(dtype, [&](auto element, auto sum) {
    using T = decltype(element);
    embedding_segments_kernel<T, decltype(sum)>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            threads.bits, shape, in, static_cast<T*>(rows));
  });
  check_cuda(cudaGetLastError(), "embedding_segments");
}

void embedding_update_cuda(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                           const RowOptimizer& optimizer, void* table, void* state, void* stream) {
  if (shape.ids == 0 || shape.dim == 0) return;
  const RowThreads threads = row_threads(shape.ids, 32, "embedding_update");
  dispatch(dtype, [&](auto element, auto sum) {
    using T = decltype(element);
    using S = decltype(sum);
    embedding_update_kernel<T, S>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            shape, in, optimizer, static_cast<T*>(table), static_cast<S*>(state));
  });
  check_cuda(cudaGetLastError(), "embedding_update");
}

}  // namespace heterps
