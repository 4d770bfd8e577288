#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <utility>

#include "check.cuh"
#include "heterps/gather.cuh"
#include "heterps/gather.h"

namespace heterps {
namespace {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T, int N>
struct Packing {
  using Element = T;
  using Sum = typename Accumulator<T>::type;
  using Pack = heterps::Pack<T, N>;
  static constexpr int kWidth = N;
};

// Calls `launch` with the packing for this type: 16 bytes at a time when rows and both arrays
// allow.
template <typename T, typename Launch>
void with_packing(int64_t dim, const void* a, const void* b, Launch&& launch) {
  constexpr int kWide = 16 / sizeof(T);
  if (dim % kWide == 0 && is_aligned(a) && is_aligned(b)) {
    launch(Packing<T, kWide>{});
  } else {
    launch(Packing<T, 1>{});
  }
}

template <typename Launch>
void dispatch(DType dtype, int64_t dim, const void* a, const void* b, Launch&& launch) {
  switch (dtype) {
    case DType::kFloat32:
      return with_packing<float>(dim, a, b, std::forward<Launch>(launch));
    case DType::kFloat64:
      return with_packing<double>(dim, a, b, std::forward<Launch>(launch));
    case DType::kFloat16:
      return with_packing<__half>(dim, a, b, std::forward<Launch>(launch));
    case DType::kBFloat16:
      return with_packing<__nv_bfloat16>(dim, a, b, std::forward<Launch>(launch));
  }
  throw std::runtime_error("gather: unknown dtype");
}

}  // namespace

void gather_rows_cuda(const GatherShape& shape, DType dtype, const void* x, const void* w,
                      const int64_t* inverse, void* rows, void* stream) {
  if (shape.tokens == 0 || shape.dim == 0) return;
  dispatch(dtype, shape.dim, x, rows, [&](auto packing) {
    using P = decltype(packing);
    const int64_t packs = shape.dim / P::kWidth;
    const RowThreads threads = row_threads(shape.tokens, packs, "gather_rows");
    gather_rows_kernel<typename P::Element, typename P::Sum, P::kWidth>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            threads.bits, shape.tokens, shape.k, packs, static_cast<const typename P::Pack*>(x),
            static_cast<const typename P::Sum*>(w), inverse, static_cast<typename P::Pack*>(rows));
  });
  check_cuda(cudaGetLastError(), "gather_rows");
}

void gather_sum_cuda(const GatherShape& shape, DType dtype, const void* rows, const void* w,
                     const int64_t* inverse, void* x, void* stream) {
  if (shape.tokens == 0 || shape.dim == 0) return;
  dispatch(dtype, shape.dim, rows, x, [&](auto packing) {
    using P = decltype(packing);
    const int64_t packs = shape.dim / P::kWidth;
    const RowThreads threads = row_threads(shape.tokens, packs, "gather_sum");
    gather_sum_kernel<typename P::Element, typename P::Sum, P::kWidth>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            threads.bits, shape.tokens, shape.k, packs, static_cast<const typename P::Pack*>(rows),
            static_cast<const typename P::Sum*>(w), inverse, static_cast<typename P::Pack*>(x));
  });
  check_cuda(cudaGetLastError(), "gather_sum");
}

void gather_dot_cuda(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                     const int64_t* inverse, void* w, void* stream) {
  const int64_t pairs = shape.tokens * shape.k;
  if (pairs == 0) return;
  dispatch(dtype, shape.dim, x, rows, [&](auto packing) {
    using P = decltype(packing);
    const RowThreads threads = row_threads(pairs, 32, "gather_dot");
    gather_dot_kernel<typename P::Element, typename P::Sum, P::kWidth>
        <<<threads.blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            pairs, shape.k, shape.dim / P::kWidth, static_cast<const typename P::Pack*>(x),
            static_cast<const typename P::Pack*>(rows), inverse, static_cast<typename P::Sum*>(w));
  });
  check_cuda(cudaGetLastError(), "gather_dot");
}

}  // namespace heterps
