#include "heterps/quantize.h"

#include "arrays.h"

namespace heterps {
namespace {

void quantize_rows(const Input& x, const Output& q, const Output& scale,
                   [[maybe_unused]] uintptr_t stream, int threads) {
  const int64_t rows = size_of(x, "x", 0, 2), dim = size_of(x, "x", 1, 2);
  const int device = x.device_type();
  const bool on_cuda = is_cuda(x);
  check(x, "x", nb::dtype<float>(), device, {rows, dim});
  check(q, "q", nb::dtype<int8_t>(), device, {rows, dim});
  check(scale, "scale", nb::dtype<float>(), device, {rows});
  nb::gil_scoped_release release;
  if (!on_cuda) {
    return quantize_rows_cpu(rows, dim, data<float>(x), data<int8_t>(q), data<float>(scale),
                             threads);
  }
#ifdef HETERPS_WITH_CUDA
  quantize_rows_cuda(rows, dim, data<float>(x), data<int8_t>(q), data<float>(scale),
                     stream_of(stream));
#endif
}

void dequantize_rows(const Input& q, const Input& scale, const Output& x,
                     [[maybe_unused]] uintptr_t stream, int threads) {
  const int64_t rows = size_of(q, "q", 0, 2), dim = size_of(q, "q", 1, 2);
  const int device = q.device_type();
  const bool on_cuda = is_cuda(q);
  check(q, "q", nb::dtype<int8_t>(), device, {rows, dim});
  check(scale, "scale", nb::dtype<float>(), device, {rows});
  check(x, "x", nb::dtype<float>(), device, {rows, dim});
  nb::gil_scoped_release release;
  if (!on_cuda) {
    return dequantize_rows_cpu(rows, dim, data<int8_t>(q), data<float>(scale), data<float>(x),
                               threads);
  }
#ifdef HETERPS_WITH_CUDA
  dequantize_rows_cuda(rows, dim, data<int8_t>(q), data<float>(scale), data<float>(x),
                       stream_of(stream));
#endif
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_rows", &quantize_rows, "x"_a.noconvert(), "q"_a.noconvert(),
        "scale"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
  m.def("dequantize_rows", &dequantize_rows, "q"_a.noconvert(), "scale"_a.noconvert(),
        "x"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
}

}  // namespace heterps
