// Python bindings of routing and of the gathers (see arrays.h).
#include "arrays.h"
#include "heterps/gather.h"
#include "heterps/route.h"

namespace heterps {
namespace {

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

void gather_rows(const Input& x, const std::optional<Input>& weights, const Input& order, int64_t k,
                 const Output& rows, [[maybe_unused]] uintptr_t stream, int threads) {
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
  nb::gil_scoped_release release;
  gather_rows_cpu(shape, kind.dtype, data<void>(x), w, data<int64_t>(order), data<void>(rows),
                  threads);
}

void gather_sum(const Input& rows, const std::optional<Input>& weights, const Input& inverse,
                int64_t k, const Output& x, [[maybe_unused]] uintptr_t stream, int threads) {
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
  nb::gil_scoped_release release;
  gather_sum_cpu(shape, kind.dtype, data<void>(rows), w, data<int64_t>(inverse), data<void>(x),
                 threads);
}

void gather_dot(const Input& x, const Input& rows, const Input& inverse, int64_t k,
                const Output& weights, [[maybe_unused]] uintptr_t stream, int threads) {
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
  nb::gil_scoped_release release;
  gather_dot_cpu(shape, kind.dtype, data<void>(x), data<void>(rows), data<int64_t>(inverse),
                 data<void>(weights), threads);
}

}  // namespace
}  // namespace heterps

NB_MODULE(_ops, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.doc() = "Native ops (see workers/ops.py, which registers them with torch)";
  m.attr("has_cuda") = heterps::kHasCuda;
  heterps::bind_grouped_ffn(m);
  heterps::bind_rows(m);
  m.def("route_workspace", &heterps::workspace_size, "pairs"_a, "experts"_a,
        "int64 elements of scratch memory that `route` needs on a CUDA device.");
  m.def("route", &heterps::route, "logits"_a.noconvert(), "k"_a, "chosen"_a.noconvert(),
        "order"_a.noconvert(), "inverse"_a.noconvert(), "offsets"_a.noconvert(),
        "workspace"_a.noconvert() = nb::none(), "stream"_a = 0,
        "Chooses k experts for each token and groups the pairs by expert.");
  m.def("gather_rows", &heterps::gather_rows, "x"_a.noconvert(), "weights"_a.noconvert().none(),
        "order"_a.noconvert(), "k"_a, "rows"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "rows[p] = weights[order[p]] * x[order[p] / k]");
  m.def("gather_sum", &heterps::gather_sum, "rows"_a.noconvert(), "weights"_a.noconvert().none(),
        "inverse"_a.noconvert(), "k"_a, "x"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "x[t] = sum_j weights[t, j] * rows[inverse[t, j]]");
  m.def("gather_dot", &heterps::gather_dot, "x"_a.noconvert(), "rows"_a.noconvert(),
        "inverse"_a.noconvert(), "k"_a, "weights"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "weights[t, j] = <x[t], rows[inverse[t, j]]>");
}
