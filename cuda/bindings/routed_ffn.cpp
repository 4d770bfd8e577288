#include "heterps/routed_ffn.h"

#include "arrays.h"
#include "ffn_shape.h"

namespace heterps {
namespace {

// What both passes are given, checked.
struct Routed {
  FfnShape shape;
  Kind kind;
  FfnTokens tokens;

  Routed(const Input& x, const Input& weights, const Input& order, const Input& inverse,
         const Input& offsets, const Input& w1, const Input& w2, int activation)
      : shape(
            ffn_shape_of(size_of(order, "order", 0, 1), size_of(x, "x", 1, 2), w1, w2, activation)),
        kind(kind_of(x)) {
    if (kind.on_cuda) throw nb::value_error("x: expected an array on a CPU");
    tokens = {size_of(x, "x", 0, 2), size_of(weights, "weights", 1, 2), data<int64_t>(order),
              data<void>(weights)};
    if (tokens.k < 1) throw nb::value_error("weights: expected at least one choice");
    check(x, "x", kind.rows, kind.device, {tokens.tokens, shape.dim});
    check(weights, "weights", kind.weights, kind.device, {tokens.tokens, tokens.k});
    check(order, "order", nb::dtype<int64_t>(), kind.device, {shape.rows});
    check(inverse, "inverse", nb::dtype<int64_t>(), kind.device, {tokens.tokens * tokens.k});
    check(offsets, "offsets", nb::dtype<int64_t>(), kind.device, {shape.groups + 1});
    check(w1, "w1", kind.rows, kind.device, {shape.groups, shape.dim, shape.inner()});
    check(w2, "w2", kind.rows, kind.device, {shape.groups, shape.hidden, shape.dim});
  }
};

void forward(const Input& x, const Input& weights, const Input& order, const Input& inverse,
             const Input& offsets, const Input& w1, const Input& w2, int activation,
             const Output& out, const Output& rows, const std::optional<Output>& pre, int threads) {
  const Routed r(x, weights, order, inverse, offsets, w1, w2, activation);
  check(out, "out", r.kind.rows, r.kind.device, {r.tokens.tokens, r.shape.dim});
  check(rows, "rows", r.kind.rows, r.kind.device, {r.shape.rows, r.shape.dim});
  if (pre) check(*pre, "pre", r.kind.rows, r.kind.device, {r.shape.rows, r.shape.inner()});
  RoutedArrays arrays{{data<void>(x), data<int64_t>(offsets), data<void>(w1), data<void>(w2),
                       data_or_null(pre), nullptr, data<void>(rows)},
                      data<int64_t>(inverse)};
  arrays.ffn.tokens = &r.tokens;
  nb::gil_scoped_release release;
  routed_ffn_cpu(r.shape, r.kind.dtype, arrays, data<void>(out), threads);
}

void backward(const Input& grad, const Input& x, const Input& weights, const Input& order,
              const Input& inverse, const Input& offsets, const Output& rows, const Output& pre,
              const Input& w1, const Input& w2, int activation,
              const std::optional<Output>& grad_rows, const std::optional<Output>& grad_x,
              const std::optional<Output>& grad_weights, const std::optional<Output>& grad_w1,
              const std::optional<Output>& grad_w2, int threads) {
  const Routed r(x, weights, order, inverse, offsets, w1, w2, activation);
  const FfnShape& s = r.shape;
  const Kind& kind = r.kind;
  check(grad, "grad", kind.rows, kind.device, {r.tokens.tokens, s.dim});
  check(rows, "rows", kind.rows, kind.device, {s.rows, s.dim});
  check(pre, "pre", kind.rows, kind.device, {s.rows, s.inner()});
  if (grad_rows.has_value() != grad_x.has_value()) {
    throw nb::value_error("grad_rows: expected an array together with grad_x");
  }
  if (grad_x) {
    check(*grad_rows, "grad_rows", kind.rows, kind.device, {s.rows, s.dim});
    check(*grad_x, "grad_x", kind.rows, kind.device, {r.tokens.tokens, s.dim});
  }
  if (grad_weights) {
    check(*grad_weights, "grad_weights", kind.weights, kind.device, {r.tokens.tokens, r.tokens.k});
  }
  if (grad_w1.has_value() != grad_w2.has_value()) {
    throw nb::value_error("grad_w2: expected an array together with grad_w1");
  }
  if (grad_w1) {
    check(*grad_w1, "grad_w1", kind.rows, kind.device, {s.groups, s.dim, s.inner()});
    check(*grad_w2, "grad_w2", kind.rows, kind.device, {s.groups, s.hidden, s.dim});
  }
  RoutedArrays arrays{{data<void>(x), data<int64_t>(offsets), data<void>(w1), data<void>(w2),
                       data<void>(pre), nullptr, data<void>(rows)},
                      data<int64_t>(inverse)};
  arrays.ffn.tokens = &r.tokens;
  const RoutedGradients gradients{
      {data<void>(grad), nullptr, data_or_null(grad_rows), data_or_null(grad_w1),
       data_or_null(grad_w2), data_or_null(grad_weights)},
      data_or_null(grad_x)};
  nb::gil_scoped_release release;
  routed_ffn_backward_cpu(s, kind.dtype, arrays, gradients, threads);
}

}  // namespace

void bind_routed_ffn(nb::module_& m) {
  m.def("routed_ffn", &forward, "x"_a.noconvert(), "weights"_a.noconvert(), "order"_a.noconvert(),
        "inverse"_a.noconvert(), "offsets"_a.noconvert(), "w1"_a.noconvert(), "w2"_a.noconvert(),
        "activation"_a, "out"_a.noconvert(), "rows"_a.noconvert(), "pre"_a.noconvert().none(),
        "threads"_a = 1,
        "out = gather_sum(rows, weights), rows = grouped_ffn(gather_rows(x)), on a CPU.");
  m.def("routed_ffn_backward", &backward, "grad"_a.noconvert(), "x"_a.noconvert(),
        "weights"_a.noconvert(), "order"_a.noconvert(), "inverse"_a.noconvert(),
        "offsets"_a.noconvert(), "rows"_a.noconvert(), "pre"_a.noconvert(), "w1"_a.noconvert(),
        "w2"_a.noconvert(), "activation"_a, "grad_rows"_a.noconvert().none(),
        "grad_x"_a.noconvert().none(), "grad_weights"_a.noconvert().none(),
        "grad_w1"_a.noconvert().none(), "grad_w2"_a.noconvert().none(), "threads"_a = 1,
        "Gradients of routed_ffn; grad_rows is scratch.");
}

}  // namespace heterps
