#include "heterps/gather.h"

#include "arrays.h"

namespace heterps {
namespace {

void gather_rows(const Input& x, const std::optional<Input>& weights, const Input& order, int64_t k,
                 const Output& rows, [[maybe_unused]] uintptr_t stream, int threads,
                 const std::optional<Input>& inverse) {
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
    if (!inverse) throw nb::value_error("inverse: expected an array for a CUDA device");
    check(*inverse, "inverse", nb::dtype<int64_t>(), kind.device, {shape.tokens * k});
    nb::gil_scoped_release release;
    gather_rows_cuda(shape, kind.dtype, data<void>(x), w, data<int64_t>(*inverse), data<void>(rows),
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

void bind_gather(nb::module_& m) {
  m.def("gather_rows", &gather_rows, "x"_a.noconvert(), "weights"_a.noconvert().none(),
        "order"_a.noconvert(), "k"_a, "rows"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "inverse"_a.noconvert() = nb::none(), "rows[p] = weights[order[p]] * x[order[p] / k]");
  m.def("gather_sum", &gather_sum, "rows"_a.noconvert(), "weights"_a.noconvert().none(),
        "inverse"_a.noconvert(), "k"_a, "x"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "x[t] = sum_j weights[t, j] * rows[inverse[t, j]]");
  m.def("gather_dot", &gather_dot, "x"_a.noconvert(), "rows"_a.noconvert(), "inverse"_a.noconvert(),
        "k"_a, "weights"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "weights[t, j] = <x[t], rows[inverse[t, j]]>");
}

}  // namespace heterps
