#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>

#include "check.cuh"
#include "grouped_ffn_sm90.h"
#include "heterps/ffn_steps.cuh"
#include "heterps/grouped_product.cuh"

namespace heterps {
namespace {

constexpr int64_t kAlignment = 128;  // of what CUTLASS has in its scratch

int64_t arrays_bytes(int64_t groups) {
  const int64_t bytes = groups * (3 * sizeof(int32_t) + 6 * sizeof(int64_t));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

GroupArrays arrays_in(void* workspace, int64_t groups) {
  auto* words = static_cast<int64_t*>(workspace);
  return {reinterpret_cast<int32_t*>(words + 6 * groups),
          reinterpret_cast<const void**>(words),
          reinterpret_cast<const void**>(words + groups),
          reinterpret_cast<void**>(words + 2 * groups),
          words + 3 * groups,
          words + 4 * groups,
          words + 5 * groups};
}

unsigned run_blocks(int64_t runs) {
  const int64_t blocks = (runs + kRowThreads - 1) / kRowThreads;
  if (blocks > INT32_MAX) throw std::runtime_error("grouped_ffn: too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "grouped_ffn: device");
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "grouped_ffn: device");
  return value;
}

// One product, by what FfnArrays names its operands.
template <typename T>
void product(ProductKind kind, DType dtype, const FfnShape& shape, int64_t depth, int64_t width,
             const FfnArrays& arrays, const void* left, const void* right, void* out,
             cudaStream_t stream) {
  const GroupArrays each = arrays_in(arrays.workspace, shape.groups);
  const auto blocks = static_cast<unsigned>((shape.groups + kGroupThreads - 1) / kGroupThreads);
  group_arrays_kernel<T><<<blocks, kGroupThreads, 0, stream>>>(
      kind, shape.groups, depth, width, arrays.offsets, static_cast<const T*>(left),
      static_cast<const T*>(right), static_cast<T*>(out), each);
  if (kind == ProductKind::kWeights) {
    const int64_t size = depth * width;
    const auto across = static_cast<unsigned>(std::min<int64_t>(64, size / 2048 + 1));
    zero_empty_kernel<T><<<dim3(across, static_cast<unsigned>(shape.groups)), 256, 0, stream>>>(
        size, arrays.offsets, static_cast<T*>(out));
  }
  product_sm90(kind, dtype, {shape.groups, shape.rows, depth}, each,
               static_cast<char*>(arrays.workspace) + arrays_bytes(shape.groups), stream);
}

template <typename T>
void forward(const FfnShape& s, DType dtype, const FfnArrays& a, cudaStream_t stream) {
  product<T>(ProductKind::kRows, dtype, s, s.dim, s.inner(), a, a.rows, a.w1, a.pre, stream);
  const int64_t runs = s.rows * s.hidden / kRun<T>;
  ffn_activate_kernel<T><<<run_blocks(runs), kRowThreads, 0, stream>>>(
      runs, s.hidden, s.activation, static_cast<const T*>(a.pre), static_cast<T*>(a.act));
  product<T>(ProductKind::kRows, dtype, s, s.hidden, s.dim, a, a.act, a.w2, a.out, stream);
}

template <typename T>
void backward(const FfnShape& s, DType dtype, const FfnArrays& a, const FfnGradients& g,
              cudaStream_t stream) {
  product<T>(ProductKind::kTransposed, dtype, s, s.dim, s.hidden, a, g.out, a.w2, a.act, stream);
  const int64_t runs = s.rows * s.hidden / kRun<T>;
  ffn_slope_kernel<T><<<run_blocks(runs), kRowThreads, 0, stream>>>(
      runs, s.hidden, s.activation, static_cast<const T*>(a.pre), static_cast<T*>(a.act),
      static_cast<T*>(g.pre));
  if (g.rows != nullptr) {
    product<T>(ProductKind::kTransposed, dtype, s, s.inner(), s.dim, a, g.pre, a.w1, g.rows,
               stream);
  }
  if (g.w1 == nullptr) return;
  product<T>(ProductKind::kWeights, dtype, s, s.dim, s.inner(), a, a.rows, g.pre, g.w1, stream);
  product<T>(ProductKind::kWeights, dtype, s, s.hidden, s.dim, a, a.act, g.out, g.w2, stream);
}

}  // namespace

int64_t grouped_ffn_workspace(const FfnShape& shape, DType dtype) {
  const bool narrow = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  const bool fits = shape.rows > 0 && shape.dim > 0 && shape.hidden > 0 && shape.dim % 8 == 0 &&
                    shape.hidden % 8 == 0 && shape.groups <= 65535 && shape.rows <= INT32_MAX &&
                    shape.dim <= INT32_MAX && shape.inner() <= INT32_MAX;
  if (!narrow || !fits || !has_products_sm90()) return 0;
  if (attribute(cudaDevAttrComputeCapabilityMajor) != 9) return 0;
  if (attribute(cudaDevAttrComputeCapabilityMinor) != 0) return 0;
  return arrays_bytes(shape.groups) + product_workspace_sm90(shape.groups);
}

bool takes_sm90(const FfnArrays& arrays, const FfnGradients* gradients) {
  const auto aligned = [](std::initializer_list<const void*> pointers) {
    return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
      return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    });
  };
  if (arrays.workspace == nullptr || reinterpret_cast<uintptr_t>(arrays.workspace) % kAlignment) {
    return false;
  }
  if (!aligned({arrays.rows, arrays.w1, arrays.w2, arrays.pre, arrays.act, arrays.out})) {
    return false;
  }
  return gradients == nullptr ||
         aligned({gradients->out, gradients->pre, gradients->rows, gradients->w1, gradients->w2});
}

void grouped_ffn_sm90(const FfnShape& shape, DType dtype, const FfnArrays& arrays, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kFloat16) {
    forward<__half>(shape, dtype, arrays, queue);
  } else {
    forward<__nv_bfloat16>(shape, dtype, arrays, queue);
  }
  check_cuda(cudaGetLastError(), "grouped_ffn");
}

void grouped_ffn_backward_sm90(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                               const FfnGradients& gradients, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kFloat16) {
    backward<__half>(shape, dtype, arrays, gradients, queue);
  } else {
    backward<__nv_bfloat16>(shape, dtype, arrays, gradients, queue);
  }
  check_cuda(cudaGetLastError(), "grouped_ffn_backward");
}

}  // namespace heterps
