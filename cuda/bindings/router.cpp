#include "heterps/router.h"

#include "arrays.h"

namespace heterps {
namespace {

// The sizes of a router whose arrays on a CPU are checked.
RouterShape shape_of(const Input& x, const Input& weight) {
  const RouterShape shape{size_of(x, "x", 0, 2), size_of(x, "x", 1, 2),
                          size_of(weight, "weight", 0, 2)};
  check(x, "x", nb::dtype<float>(), nb::device::cpu::value, {shape.tokens, shape.dim});
  check(weight, "weight", nb::dtype<float>(), nb::device::cpu::value, {shape.experts, shape.dim});
  return shape;
}

void logits(const Input& x, const Input& weight, const std::optional<Input>& bias, const Output& to,
            int threads) {
  const RouterShape s = shape_of(x, weight);
  if (bias) check(*bias, "bias", nb::dtype<float>(), nb::device::cpu::value, {s.experts});
  check(to, "logits", nb::dtype<float>(), nb::device::cpu::value, {s.tokens, s.experts});
  nb::gil_scoped_release release;
  router_logits_cpu(s, data<float>(x), data<float>(weight), bias ? data<float>(*bias) : nullptr,
                    data<float>(to), threads);
}

void backward(const Input& grad, const Input& x, const Input& weight,
              const std::optional<Output>& grad_x, const std::optional<Output>& grad_weight,
              int threads) {
  const RouterShape s = shape_of(x, weight);
  check(grad, "grad", nb::dtype<float>(), nb::device::cpu::value, {s.tokens, s.experts});
  if (grad_x)
    check(*grad_x, "grad_x", nb::dtype<float>(), nb::device::cpu::value, {s.tokens, s.dim});
  if (grad_weight) {
    check(*grad_weight, "grad_weight", nb::dtype<float>(), nb::device::cpu::value,
          {s.experts, s.dim});
  }
  nb::gil_scoped_release release;
  router_backward_cpu(
      s, data<float>(grad), data<float>(x), data<float>(weight),
      {grad_x ? data<float>(*grad_x) : nullptr, grad_weight ? data<float>(*grad_weight) : nullptr},
      threads);
}

}  // namespace

void bind_router(nb::module_& m) {
  m.def("router_logits", &logits, "x"_a.noconvert(), "weight"_a.noconvert(),
        "bias"_a.noconvert().none(), "logits"_a.noconvert(), "threads"_a = 1,
        "logits = x weight^T + bias, on a CPU.");
  m.def("router_backward", &backward, "grad"_a.noconvert(), "x"_a.noconvert(),
        "weight"_a.noconvert(), "grad_x"_a.noconvert().none(), "grad_weight"_a.noconvert().none(),
        "threads"_a = 1, "Adds to grad_x its gradient, and writes grad_weight.");
}

}  // namespace heterps
