// What the bindings share: destination-passing (the caller allocates the outputs), arrays of any
// framework that speaks DLPack (borrowed.h), nothing converted or copied, the GIL released while an
// op works.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "borrowed.h"
#include "heterps/dtype.h"

using namespace nb::literals;

namespace heterps {

using Input = Borrowed<false>;
using Output = Borrowed<true>;

// The lowest capability of a device that the kernels are built for, major * 10 + minor; 0: none.
#ifdef HETERPS_WITH_CUDA
constexpr int kCudaCapability = HETERPS_CUDA_CAPABILITY;
#else
constexpr int kCudaCapability = 0;
#endif

inline std::string join(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Everything an op relies on: the device, the element type, the shape, C order.
template <typename Array>
void check(const Array& array, const char* name, nb::dlpack::dtype dtype, int device,
           std::initializer_list<int64_t> shape) {
  const auto fail = [name](const std::string& expected) {
    throw nb::value_error((std::string(name) + ": expected " + expected).c_str());
  };
  if (array.device_type() != device) fail("all arrays on one device");
  if (array.dtype() != dtype) {
    fail("element type code " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) +
         " bits, got code " + std::to_string(array.dtype().code) + " of " +
         std::to_string(array.dtype().bits) + " bits");
  }
  bool equal = array.ndim() == shape.size();
  for (size_t i = 0; equal && i < shape.size(); ++i) {
    equal = static_cast<int64_t>(array.shape(i)) == shape.begin()[i];
  }
  if (!equal) fail("shape " + join(shape));
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0 && array.size() > 0;) {
    if (shape.begin()[i] > 1 && array.stride(i) != stride) fail("a contiguous array");
    stride *= shape.begin()[i];
  }
}

inline int64_t size_of(const Input& array, const char* name, size_t axis, size_t ndim) {
  if (array.ndim() != ndim) {
    throw nb::value_error((std::string(name) + ": expected " + std::to_string(ndim) +
                           " dimensions, got " + std::to_string(array.ndim()))
                              .c_str());
  }
  return static_cast<int64_t>(array.shape(axis));
}

template <typename T, typename Array>
auto data(const Array& array) {
  using Element = std::conditional_t<std::is_same_v<Array, Input>, const T, T>;
  return static_cast<Element*>(array.data());
}

// Where arrays lie that are for kernels: on a CPU where these are emulated (tests/cuda/emulate).
#ifndef HETERPS_CUDA_DEVICE
#define HETERPS_CUDA_DEVICE nb::device::cuda::value
#endif

// The device decides between the twins; a CUDA array needs a build that has the kernels.
inline bool is_cuda(const Input& array) {
  if (array.device_type() == HETERPS_CUDA_DEVICE) {
    if constexpr (kCudaCapability > 0) return true;
    throw nb::value_error(
        "this build has no CUDA kernels: reinstall where nvcc and an NVIDIA GPU are present, or "
        "with HETERPS_CUDA=ON");
  }
  if (array.device_type() == nb::device::cpu::value) return false;
  throw nb::value_error("expected arrays on a CPU or a CUDA device");
}

inline void* stream_of(uintptr_t stream) { return reinterpret_cast<void*>(stream); }

// The type of rows, the type of weights that goes with it, and where both lie.
struct Kind {
  DType dtype;
  nb::dlpack::dtype rows;
  nb::dlpack::dtype weights;
  int device;
  bool on_cuda;
};

inline Kind kind_of(const Input& rows) {
  Kind kind{DType::kFloat32, rows.dtype(), nb::dtype<float>(), rows.device_type(), is_cuda(rows)};
  const auto code = static_cast<nb::dlpack::dtype_code>(kind.rows.code);
  if (kind.rows == nb::dtype<double>()) {
    kind.dtype = DType::kFloat64;
    kind.weights = kind.rows;
  } else if (kind.rows.bits == 16 && code == nb::dlpack::dtype_code::Float) {
    kind.dtype = DType::kFloat16;
  } else if (kind.rows.bits == 16 && code == nb::dlpack::dtype_code::Bfloat) {
    kind.dtype = DType::kBFloat16;
  } else if (kind.rows != nb::dtype<float>()) {
    throw nb::value_error("rows: expected float16, bfloat16, float32 or float64");
  }
  return kind;
}

// An optional array's memory, or null.
template <typename Array>
auto data_or_null(const std::optional<Array>& array) {
  return array ? data<void>(*array) : nullptr;
}

void bind_route(nb::module_& m);
void bind_gather(nb::module_& m);
void bind_grouped_ffn(nb::module_& m);
void bind_routed_ffn(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_embedding(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_row_cache(nb::module_& m);

}  // namespace heterps
