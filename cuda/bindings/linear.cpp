#include "heterps/linear.h"

#include "arrays.h"

namespace heterps {
namespace {

void check_cpu(const auto& array, const char* name, std::initializer_list<int64_t> shape) {
  check(array, name, nb::dtype<float>(), nb::device::cpu::value, shape);
}

void forward(const Input& x, const Input& weight, const std::optional<Input>& bias, const Output& y,
             int threads) {
  const LinearShape s{size_of(x, "x", 0, 2), size_of(x, "x", 1, 2),
                      size_of(weight, "weight", 0, 2)};
  check_cpu(x, "x", {s.rows, s.inputs});
  check_cpu(weight, "weight", {s.outputs, s.inputs});
  if (bias) check_cpu(*bias, "bias", {s.outputs});
  check_cpu(y, "y", {s.rows, s.outputs});
  nb::gil_scoped_release release;
  linear_forward_cpu(s, data<float>(x), data<float>(weight), bias ? data<float>(*bias) : nullptr,
                     data<float>(y), threads);
}

void grad_input(const Input& grad, const Input& weight, const Output& grad_x, bool add,
                int threads) {
  const LinearShape s{size_of(grad, "grad", 0, 2), size_of(weight, "weight", 1, 2),
                      size_of(weight, "weight", 0, 2)};
  check_cpu(grad, "grad", {s.rows, s.outputs});
  check_cpu(weight, "weight", {s.outputs, s.inputs});
  check_cpu(grad_x, "grad_x", {s.rows, s.inputs});
  nb::gil_scoped_release release;
  linear_grad_input_cpu(s, data<float>(grad), data<float>(weight), data<float>(grad_x), add,
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
        "bias"_a.noconvert().none(), "y"_a.noconvert(), "threads"_a = 1,
        "y = x weight^T + bias, on a CPU.");
  m.def("linear_grad_input", &grad_input, "grad"_a.noconvert(), "weight"_a.noconvert(),
        "grad_x"_a.noconvert(), "add"_a = false, "threads"_a = 1,
        "grad_x = grad weight, or that added to it.");
  m.def("linear_grad_weight", &grad_weight, "grad"_a.noconvert(), "x"_a.noconvert(),
        "grad_weight"_a.noconvert(), "threads"_a = 1, "grad_weight = grad^T x.");
}

}  // namespace heterps
