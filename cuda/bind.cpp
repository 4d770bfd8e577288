// Python binding of the ops: destination-passing (the caller allocates the outputs), arrays of any
// framework that speaks DLPack, nothing converted or copied, the GIL released while an op works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "heterps/gather.h"
#include "heterps/route.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps {
namespace {

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;

#ifdef HETERPS_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

std::string join(std::initializer_list<int64_t> shape) {
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

int64_t size_of(const Input& array, const char* name, size_t axis, size_t ndim) {
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

// The device decides between the twins; a CUDA array needs a build that has the kernels.
bool is_cuda(const Input& array) {
  if (array.device_type() == nb::device::cpu::value) return false;
  if (array.device_type() == nb::device::cuda::value) {
    if constexpr (kHasCuda) return true;
    throw nb::value_error(
        "this build has no CUDA kernels: reinstall where nvcc and an NVIDIA GPU are present, or "
        "with HETERPS_CUDA=ON");
  }
  throw nb::value_error("expected arrays on a CPU or a CUDA device");
}

[[maybe_unused]] void* stream_of(uintptr_t stream) { return reinterpret_cast<void*>(stream); }

void route(const Input& logits, int64_t k, const Output& chosen, const Output& order,
           const Output& inverse, const Output& offsets, const std::optional<Output>& workspace,
           [[maybe_unused]] uintptr_t stream) {
  const int64_t tokens = size_of(logits, "logits", 0, 2);
  const int64_t experts = size_of(logits, "logits", 1, 2);
  const int64_t pairs = tokens * k;
  const int device = logits.device_type();
  const bool on_cuda = is_cuda(logits);
  if (experts > INT32_MAX || k < 1 || k > experts) {
    throw nb::value_error(("k: expected 1 to the number of experts, " + std::to_string(experts) +
                           ", got " + std::to_string(k))
                              .c_str());
  }
  check(logits, "logits", nb::dtype<float>(), device, {tokens, experts});
  check(chosen, "chosen", nb::dtype<int32_t>(), device, {tokens, k});
  check(order, "order", nb::dtype<int64_t>(), device, {pairs});
  check(inverse, "inverse", nb::dtype<int64_t>(), device, {pairs});
  check(offsets, "offsets", nb::dtype<int64_t>(), device, {experts + 1});
  const RouteArgs args{data<float>(logits),
                       tokens,
                       experts,
                       k,
                       data<int32_t>(chosen),
                       data<int64_t>(order),
                       data<int64_t>(inverse),
                       data<int64_t>(offsets)};
  if (on_cuda) {
#ifdef HETERPS_WITH_CUDA
    if (!workspace) throw nb::value_error("workspace: expected an array for a CUDA device");
    check(*workspace, "workspace", nb::dtype<int64_t>(), device, {route_workspace(pairs, experts)});
    nb::gil_scoped_release release;
    route_cuda(args, data<int64_t>(*workspace), stream_of(stream));
#endif
  } else {
    nb::gil_scoped_release release;
    route_cpu(args);
  }
}

int64_t workspace_size(int64_t pairs, int64_t experts) {
#ifdef HETERPS_WITH_CUDA
  return route_workspace(pairs, experts);
#else
  (void)pairs, (void)experts;
  return 0;
#endif
}

// The type of rows, the type of weights that goes with it, and where both lie.
struct Kind {
  DType dtype;
  nb::dlpack::dtype rows;
  nb::dlpack::dtype weights;
  int device;
  bool on_cuda;
};

Kind kind_of(const Input& rows) {
  Kind kind{DType::kFloat32, rows.dtype(), nb::dtype<float>(), rows.device_type(), is_cuda(rows)};
  const auto code = static_cast<nb::dlpack::dtype_code>(kind.rows.code);
  if (kind.rows == nb::dtype<double>()) {
    kind.dtype = DType::kFloat64;
    kind.weights = kind.rows;
  } else if (kind.on_cuda && kind.rows.bits == 16 && code == nb::dlpack::dtype_code::Float) {
    kind.dtype = DType::kFloat16;
  } else if (kind.on_cuda && kind.rows.bits == 16 && code == nb::dlpack::dtype_code::Bfloat) {
    kind.dtype = DType::kBFloat16;
  } else if (kind.rows != nb::dtype<float>()) {
    throw nb::value_error(kind.on_cuda ? "rows: expected float16, bfloat16, float32 or float64"
                                       : "rows: expected float32 or float64");
  }
  return kind;
}

// Calls `work` with a value of the CPU element type, the GIL released.
template <typename Work>
void on_cpu(const Kind& kind, Work&& work) {
  nb::gil_scoped_release release;
  if (kind.dtype == DType::kFloat64) {
    work(double{});
  } else {
    work(float{});
  }
}

void gather_rows(const Input& x, const std::optional<Input>& weights, const Input& order, int64_t k,
                 const Output& rows, [[maybe_unused]] uintptr_t stream) {
  const GatherShape shape{size_of(x, "x", 0, 2), size_of(order, "order", 0, 1), k,
                          size_of(x, "x", 1, 2)};
  const Kind kind = kind_of(x);
  if (k < 1) throw nb::value_error("k: expected at least 1");
  check(x, "x", kind.rows, kind.device, {shape.tokens, shape.dim});
  if (weights) check(*weights, "weights", kind.weights, kind.device, {shape.tokens, k});
  check(order, "order", nb::dtype<int64_t>(), kind.device, {shape.rows});
  check(rows, "rows", kind.rows, kind.device, {shape.rows, shape.dim});
  const void* w = weights ? data<void>(*weights) : nullptr;
  if (kind.on_cuda) {
#ifdef HETERPS_WITH_CUDA
    nb::gil_scoped_release release;
    gather_rows_cuda(shape, kind.dtype, data<void>(x), w, data<int64_t>(order), data<void>(rows),
                     stream_of(stream));
#endif
    return;
  }
  on_cpu(kind, [&]<typename T>(T) {
    gather_rows_cpu(shape, data<T>(x), static_cast<const T*>(w), data<int64_t>(order),
                    data<T>(rows));
  });
}

void gather_sum(const Input& rows, const std::optional<Input>& weights, const Input& inverse,
                int64_t k, const Output& x, [[maybe_unused]] uintptr_t stream) {
  if (k < 1) throw nb::value_error("k: expected at least 1");
  const GatherShape shape{size_of(inverse, "inverse", 0, 1) / k, size_of(rows, "rows", 0, 2), k,
                          size_of(rows, "rows", 1, 2)};
  const Kind kind = kind_of(rows);
  check(rows, "rows", kind.rows, kind.device, {shape.rows, shape.dim});
  if (weights) check(*weights, "weights", kind.weights, kind.device, {shape.tokens, k});
  check(inverse, "inverse", nb::dtype<int64_t>(), kind.device, {shape.tokens * k});
  check(x, "x", kind.rows, kind.device, {shape.tokens, shape.dim});
  const void* w = weights ? data<void>(*weights) : nullptr;
  if (kind.on_cuda) {
#ifdef HETERPS_WITH_CUDA
    nb::gil_scoped_release release;
    gather_sum_cuda(shape, kind.dtype, data<void>(rows), w, data<int64_t>(inverse), data<void>(x),
                    stream_of(stream));
#endif
    return;
  }
  on_cpu(kind, [&]<typename T>(T) {
    gather_sum_cpu(shape, data<T>(rows), static_cast<const T*>(w), data<int64_t>(inverse),
                   data<T>(x));
  });
}

void gather_dot(const Input& x, const Input& rows, const Input& inverse, int64_t k,
                const Output& weights, [[maybe_unused]] uintptr_t stream) {
  if (k < 1) throw nb::value_error("k: expected at least 1");
  const GatherShape shape{size_of(x, "x", 0, 2), size_of(rows, "rows", 0, 2), k,
                          size_of(x, "x", 1, 2)};
  const Kind kind = kind_of(rows);
  check(x, "x", kind.rows, kind.device, {shape.tokens, shape.dim});
  check(rows, "rows", kind.rows, kind.device, {shape.rows, shape.dim});
  check(inverse, "inverse", nb::dtype<int64_t>(), kind.device, {shape.tokens * k});
  check(weights, "weights", kind.weights, kind.device, {shape.tokens, k});
  if (kind.on_cuda) {
#ifdef HETERPS_WITH_CUDA
    nb::gil_scoped_release release;
    gather_dot_cuda(shape, kind.dtype, data<void>(x), data<void>(rows), data<int64_t>(inverse),
                    data<void>(weights), stream_of(stream));
#endif
    return;
  }
  on_cpu(kind, [&]<typename T>(T) {
    gather_dot_cpu(shape, data<T>(x), data<T>(rows), data<int64_t>(inverse), data<T>(weights));
  });
}

}  // namespace
}  // namespace heterps

NB_MODULE(_ops, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.doc() = "Native ops (see workers/ops.py, which registers them with torch)";
  m.attr("has_cuda") = heterps::kHasCuda;
  m.def("route_workspace", &heterps::workspace_size, "pairs"_a, "experts"_a,
        "int64 elements of scratch memory that `route` needs on a CUDA device.");
  m.def("route", &heterps::route, "logits"_a.noconvert(), "k"_a, "chosen"_a.noconvert(),
        "order"_a.noconvert(), "inverse"_a.noconvert(), "offsets"_a.noconvert(),
        "workspace"_a.noconvert() = nb::none(), "stream"_a = 0,
        "Chooses k experts for each token and groups the pairs by expert.");
  m.def("gather_rows", &heterps::gather_rows, "x"_a.noconvert(), "weights"_a.noconvert().none(),
        "order"_a.noconvert(), "k"_a, "rows"_a.noconvert(), "stream"_a = 0,
        "rows[p] = weights[order[p]] * x[order[p] / k]");
  m.def("gather_sum", &heterps::gather_sum, "rows"_a.noconvert(), "weights"_a.noconvert().none(),
        "inverse"_a.noconvert(), "k"_a, "x"_a.noconvert(), "stream"_a = 0,
        "x[t] = sum_j weights[t, j] * rows[inverse[t, j]]");
  m.def("gather_dot", &heterps::gather_dot, "x"_a.noconvert(), "rows"_a.noconvert(),
        "inverse"_a.noconvert(), "k"_a, "weights"_a.noconvert(), "stream"_a = 0,
        "weights[t, j] = <x[t], rows[inverse[t, j]]>");
}
