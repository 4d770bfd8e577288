#include "heterps/linear.h"

#include "arrays.h"

namespace heterps {
namespace {

void check_cpu(const auto& array, const char* name, std::initializer_list<int64_t> shape) {
  check(array, name, nb::dtype<float>(), nb::device::cpu::value, shape);
}

void forward(const Input& x, const Input& weight, const std::optional<Input>& bias, const Output& y,
             bool relu, int threads) {
  const LinearShape s{size_of(x, "x", 0, 2), size_of(x, "x", 1, 2),
                      size_of(weight, "weight", 0, 2)};
  check_cpu(x, "x", {s.rows, s.inputs});
  check_cpu(weight, "weight", {s.outputs, s.inputs});
  if (bias) check_cpu(*bias, "bias", {s.outputs});
  check_cpu(y, "y", {s.rows, s.outputs});
  nb::gil_scoped_release release;
  linear_forward_cpu(s, data<float>(x), data<float>(weight), bias ? data<float>(*bias) : nullptr,
                     relu, data<float>(y), threads);
}

void grad_input(const Input& grad, const Input& weight, const Output& grad_x, bool add,
                const std::optional<Input>& rectified, int threads) {
  const LinearShape s{size_of(grad, "grad", 0, 2), size_of(weight, "weight", 1, 2),
                      size_of(weight, "weight", 0, 2)};
  check_cpu(grad, "grad", {s.rows, s.outputs});
  check_cpu(weight, "weight", {s.outputs, s.inputs});
  check_cpu(grad_x, "grad_x", {s.rows, s.inputs});
  if (rectified) {
    check_cpu(*rectified, "rectified", {s.rows, s.inputs});
    if (add) throw nb::value_error("rectified: expected None with add=True");
  }
  nb::gil_scoped_release release;
  linear_grad_input_cpu(s, data<float>(grad), data<float>(weight),
                        rectified ? data<float>(*rectified) : nullptr, data<float>(grad_x), add,
                        threads);
}

void grad_weight(const Input& grad, const Input& x, const Output& to, int threads) {
  const LinearShape s{size_of(x, "x", 0, 2), size_of(x, "x", 1, 2), size_of(grad, "grad", 1, 2)};
  check_cpu(grad, "grad", {s.rows, s.outputs});
  check_cpu(x, "x", {s.rows, s.inputs});
  check_cpu(to, "grad_weight", {s.outputs, s.inputs});
  nb::gil_scoped_release release;
  linear_grad_weight_cpu(s, data<float>(grad), data<float>(x), data<float>(to), threads);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear_forward", &forward, "x"_a.noconvert(), "weight"_a.noconvert(),
        "bias"_a.noconvert().none(), "y"_a.noconvert(), "relu"_a = false, "threads"_a = 1,
        "y = x weight^T + bias, and with relu 0 where that is less, on a CPU.");
  m.def("linear_grad_input", &grad_input, "grad"_a.noconvert(), "weight"_a.noconvert(),
        "grad_x"_a.noconvert(), "add"_a = false, "rectified"_a.noconvert().none() = nb::none(),
        "threads"_a = 1,
        "grad_x = grad weight, or that added to it; 0 where `rectified` is not above 0.");
  m.def("linear_grad_weight", &grad_weight, "grad"_a.noconvert(), "x"_a.noconvert(),
        "grad_weight"_a.noconvert(), "threads"_a = 1, "grad_weight = grad^T x.");
}

}  // namespace heterps
