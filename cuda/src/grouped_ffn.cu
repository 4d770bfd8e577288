#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "check.cuh"
#include "heterps/grouped_ffn.cuh"

namespace heterps {
namespace {

unsigned tiles_across(int64_t width) {
  const int64_t tiles = (width + kTileSide - 1) / kTileSide;
  if (tiles > 65535) throw std::runtime_error("grouped_ffn: expected widths below 4194240");
  return static_cast<unsigned>(tiles);
}

// One block for each tile of rows there can be, and each tile of columns.
dim3 row_grid(const FfnShape& shape, int64_t width) {
  const int64_t tiles = shape.rows / kTileSide + shape.groups;
  if (tiles > INT32_MAX) throw std::runtime_error("grouped_ffn: too many rows for one launch");
  return dim3(static_cast<unsigned>(tiles), tiles_across(width));
}

dim3 weight_grid(const FfnShape& shape, int64_t height, int64_t width) {
  if (shape.groups > 65535) throw std::runtime_error("grouped_ffn: expected at most 65535 groups");
  return dim3(tiles_across(height), tiles_across(width), static_cast<unsigned>(shape.groups));
}

template <typename T>
const T* in(const void* data) {
  return static_cast<const T*>(data);
}
template <typename T>
T* to(void* data) {
  return static_cast<T*>(data);
}

template <typename Work>
void dispatch(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return work(float{});
    case DType::kFloat64:
      return work(double{});
    case DType::kFloat16:
      return work(__half{});
    case DType::kBFloat16:
      return work(__nv_bfloat16{});
  }
  throw std::runtime_error("grouped_ffn: unknown dtype");
}

}  // namespace

void grouped_ffn_cuda(const FfnShape& shape, DType dtype, const FfnArrays& arrays, void* stream) {
  if (shape.rows == 0 || shape.dim == 0) return;
  const auto queue = static_cast<cudaStream_t>(stream);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (shape.hidden > 0) {
      ffn_first_kernel<T><<<row_grid(shape, shape.hidden), kTileThreads, 0, queue>>>(
          shape, in<T>(arrays.rows), arrays.offsets, in<T>(arrays.w1), to<T>(arrays.pre),
          to<T>(arrays.act));
    }
    ffn_rows_kernel<T><<<row_grid(shape, shape.dim), kTileThreads, 0, queue>>>(
        shape.groups, shape.dim, shape.hidden, false, in<T>(arrays.act), arrays.offsets,
        in<T>(arrays.w2), to<T>(arrays.out));
  });
  check_cuda(cudaGetLastError(), "grouped_ffn");
}

void grouped_ffn_backward_cuda(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                               const FfnGradients& gradients, void* stream) {
  if (shape.dim == 0 || shape.hidden == 0) {
    throw std::runtime_error("grouped_ffn: expected widths of at least 1");
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t inner = shape.inner();
    if (shape.rows > 0) {
      ffn_backward_kernel<T><<<row_grid(shape, shape.hidden), kTileThreads, 0, queue>>>(
          shape, in<T>(gradients.out), arrays.offsets, in<T>(arrays.w2), in<T>(arrays.pre),
          to<T>(arrays.act), to<T>(gradients.pre));
      if (gradients.rows != nullptr) {
        ffn_rows_kernel<T><<<row_grid(shape, shape.dim), kTileThreads, 0, queue>>>(
            shape.groups, shape.dim, inner, true, in<T>(gradients.pre), arrays.offsets,
            in<T>(arrays.w1), to<T>(gradients.rows));
      }
    }
    if (gradients.w1 == nullptr) return;
    ffn_weights_kernel<T><<<weight_grid(shape, shape.dim, inner), kTileThreads, 0, queue>>>(
        shape.dim, inner, in<T>(arrays.rows), in<T>(gradients.pre), arrays.offsets,
        to<T>(gradients.w1));
    ffn_weights_kernel<T><<<weight_grid(shape, shape.hidden, shape.dim), kTileThreads, 0, queue>>>(
        shape.hidden, shape.dim, in<T>(arrays.act), in<T>(gradients.out), arrays.offsets,
        to<T>(gradients.w2));
  });
  check_cuda(cudaGetLastError(), "grouped_ffn_backward");
}

}  // namespace heterps
