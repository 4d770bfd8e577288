#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "check.cuh"
#include "grouped_ffn_sm90.h"
#include "heterps/grouped_ffn.cuh"

namespace heterps {
namespace {

template <typename T>
unsigned tiles_across(int64_t width, int side = Tile<T>::kSide) {
  const int64_t tiles = (width + side - 1) / side;
  if (tiles > 65535) {
    throw std::runtime_error("grouped_ffn: expected widths below " + std::to_string(65535 * side));
  }
  return static_cast<unsigned>(tiles);
}

// `across` blocks for each tile of rows there can be.
template <typename T>
unsigned row_blocks(const FfnShape& shape, unsigned across) {
  const int64_t blocks = (shape.rows / Tile<T>::kSide + shape.groups) * across;
  if (blocks > INT32_MAX) throw std::runtime_error("grouped_ffn: too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

template <typename T>
dim3 weight_grid(const FfnShape& shape, int64_t height, int64_t width) {
  if (shape.groups > 65535) throw std::runtime_error("grouped_ffn: expected at most 65535 groups");
  return dim3(tiles_across<T>(height), tiles_across<T>(width), static_cast<unsigned>(shape.groups));
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
  if (takes_sm90(arrays, nullptr)) return grouped_ffn_sm90(shape, dtype, arrays, stream);
  const auto queue = static_cast<cudaStream_t>(stream);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kSide = Tile<T>::kSide;
    if (shape.hidden > 0) {
      const bool gated = shape.activation == Activation::kSwiglu;
      const unsigned across = tiles_across<T>(shape.hidden, gated ? kSide / 2 : kSide);
      ffn_first_kernel<T><<<row_blocks<T>(shape, across), Tile<T>::kThreads, 0, queue>>>(
          shape, across, in<T>(arrays.rows), arrays.offsets, in<T>(arrays.w1), to<T>(arrays.pre),
          to<T>(arrays.act));
    }
    const unsigned across = tiles_across<T>(shape.dim);
    ffn_rows_kernel<T, false><<<row_blocks<T>(shape, across), Tile<T>::kThreads, 0, queue>>>(
        shape.groups, shape.dim, shape.hidden, across, in<T>(arrays.act), arrays.offsets,
        in<T>(arrays.w2), to<T>(arrays.out));
  });
  check_cuda(cudaGetLastError(), "grouped_ffn");
}

void grouped_ffn_backward_cuda(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                               const FfnGradients& gradients, void* stream) {
  if (shape.dim == 0 || shape.hidden == 0) {
    throw std::runtime_error("grouped_ffn: expected widths of at least 1");
  }
  if (takes_sm90(arrays, &gradients)) {
    return grouped_ffn_backward_sm90(shape, dtype, arrays, gradients, stream);
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t inner = shape.inner();
    if (shape.rows > 0) {
      unsigned across = tiles_across<T>(shape.hidden);
      ffn_backward_kernel<T><<<row_blocks<T>(shape, across), Tile<T>::kThreads, 0, queue>>>(
          shape, across, in<T>(gradients.out), arrays.offsets, in<T>(arrays.w2), in<T>(arrays.pre),
          to<T>(arrays.act), to<T>(gradients.pre));
      if (gradients.rows != nullptr) {
        across = tiles_across<T>(shape.dim);
        ffn_rows_kernel<T, true><<<row_blocks<T>(shape, across), Tile<T>::kThreads, 0, queue>>>(
            shape.groups, shape.dim, inner, across, in<T>(gradients.pre), arrays.offsets,
            in<T>(arrays.w1), to<T>(gradients.rows));
      }
    }
    if (gradients.w1 == nullptr) return;
    ffn_weights_kernel<T><<<weight_grid<T>(shape, shape.dim, inner), Tile<T>::kThreads, 0, queue>>>(
        shape.dim, inner, in<T>(arrays.rows), in<T>(gradients.pre), arrays.offsets,
        to<T>(gradients.w1));
    ffn_weights_kernel<T>
        <<<weight_grid<T>(shape, shape.hidden, shape.dim), Tile<T>::kThreads, 0, queue>>>(
            shape.hidden, shape.dim, in<T>(arrays.act), in<T>(gradients.out), arrays.offsets,
            to<T>(gradients.w2));
  });
  check_cuda(cudaGetLastError(), "grouped_ffn_backward");
}

}  // namespace heterps
