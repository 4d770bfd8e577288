#include "heterps/embedding.h"

#include "arrays.h"

namespace heterps {
namespace {

void embedding_pool(const Input& table, const Input& ids, const Input& offsets,
                    const std::optional<Input>& scale, const Output& out,
                    [[maybe_unused]] uintptr_t stream, int threads) {
  const PoolShape s{size_of(table, "table", 0, 2), size_of(table, "table", 1, 2),
                    size_of(ids, "ids", 0, 1), size_of(offsets, "offsets", 0, 1) - 1};
  const Kind kind = kind_of(table);
  if (s.bags < 0) throw nb::value_error("offsets: expected at least one");
  check(table, "table", kind.rows, kind.device, {s.rows, s.dim});
  check(ids, "ids", nb::dtype<int64_t>(), kind.device, {s.ids});
  check(offsets, "offsets", nb::dtype<int64_t>(), kind.device, {s.bags + 1});
  if (scale) check(*scale, "scale", kind.weights, kind.device, {s.ids});
  check(out, "out", kind.rows, kind.device, {s.bags, s.dim});
  const PoolInputs in{data<int64_t>(ids), data<int64_t>(offsets), data_or_null(scale)};
  nb::gil_scoped_release release;
  if (!kind.on_cuda) {
    return embedding_pool_cpu(s, kind.dtype, in, data<void>(table), data<void>(out), threads);
  }
#ifdef HETERPS_WITH_CUDA
  embedding_pool_cuda(s, kind.dtype, in, data<void>(table), data<void>(out), stream_of(stream));
#endif
}

SegmentInputs segments_of(const PoolShape& s, const Kind& kind, const Input& grad,
                          const Input& sorted, const Input& source, const Input& bag,
                          const std::optional<Input>& scale) {
  check(grad, "grad", kind.rows, kind.device, {s.bags, s.dim});
  check(sorted, "sorted", nb::dtype<int64_t>(), kind.device, {s.ids});
  check(source, "source", nb::dtype<int64_t>(), kind.device, {s.ids});
  check(bag, "bag", nb::dtype<int64_t>(), kind.device, {s.ids});
  if (scale) check(*scale, "scale", kind.weights, kind.device, {s.ids});
  return {data<int64_t>(sorted), data<int64_t>(source), data<int64_t>(bag), data_or_null(scale),
          data<void>(grad)};
}

void embedding_segments(const Input& grad, const Input& sorted, const Input& source,
                        const Input& bag, const std::optional<Input>& scale, int64_t table_rows,
                        const Output& rows, [[maybe_unused]] uintptr_t stream, int threads) {
  const PoolShape s{table_rows, size_of(grad, "grad", 1, 2), size_of(sorted, "sorted", 0, 1),
                    size_of(grad, "grad", 0, 2)};
  const Kind kind = kind_of(grad);
  const SegmentInputs in = segments_of(s, kind, grad, sorted, source, bag, scale);
  check(rows, "rows", kind.rows, kind.device, {s.ids, s.dim});
  nb::gil_scoped_release release;
  if (!kind.on_cuda) return embedding_segments_cpu(s, kind.dtype, in, data<void>(rows), threads);
#ifdef HETERPS_WITH_CUDA
  embedding_segments_cuda(s, kind.dtype, in, data<void>(rows), stream_of(stream));
#endif
}

void embedding_update(const Input& grad, const Input& sorted, const Input& source, const Input& bag,
                      const std::optional<Input>& scale, int rule, double rate, double epsilon,
                      const Output& table, const std::optional<Output>& state,
                      [[maybe_unused]] uintptr_t stream, int threads) {
  const PoolShape s{static_cast<int64_t>(table.ndim() == 2 ? table.shape(0) : 0),
                    size_of(grad, "grad", 1, 2), size_of(sorted, "sorted", 0, 1),
                    size_of(grad, "grad", 0, 2)};
  const Kind kind = kind_of(grad);
  const SegmentInputs in = segments_of(s, kind, grad, sorted, source, bag, scale);
  check(table, "table", kind.rows, kind.device, {s.rows, s.dim});
  if (rule < 0 || rule > 2) throw nb::value_error("rule: expected 0 to 2");
  const RowOptimizer optimizer{static_cast<RowRule>(rule), rate, epsilon};
  if ((optimizer.rule == RowRule::kSgd) == state.has_value()) {
    throw nb::value_error("state: expected an array, or none with SGD");
  }
  if (optimizer.rule == RowRule::kAdagrad) {
    check(*state, "state", kind.weights, kind.device, {s.rows, s.dim});
  } else if (state) {
    check(*state, "state", kind.weights, kind.device, {s.rows});
  }
  nb::gil_scoped_release release;
  if (!kind.on_cuda) {
    return embedding_update_cpu(s, kind.dtype, in, optimizer, data<void>(table),
                                data_or_null(state), threads);
  }
#ifdef HETERPS_WITH_CUDA
  embedding_update_cuda(s, kind.dtype, in, optimizer, data<void>(table), data_or_null(state),
                        stream_of(stream));
#endif
}

}  // namespace

void bind_embedding(nb::module_& m) {
  m.def("embedding_pool", &embedding_pool, "table"_a.noconvert(), "ids"_a.noconvert(),
        "offsets"_a.noconvert(), "scale"_a.noconvert().none(), "out"_a.noconvert(), "stream"_a = 0,
        "threads"_a = 1, "out[b] = sum of scale[i] * table[ids[i]] over the ids of bag b");
  m.def("embedding_segments", &embedding_segments, "grad"_a.noconvert(), "sorted"_a.noconvert(),
        "source"_a.noconvert(), "bag"_a.noconvert(), "scale"_a.noconvert().none(), "table_rows"_a,
        "rows"_a.noconvert(), "stream"_a = 0, "threads"_a = 1,
        "The gradient of each distinct id where it first stands in `sorted`, else zero");
  m.def("embedding_update", &embedding_update, "grad"_a.noconvert(), "sorted"_a.noconvert(),
        "source"_a.noconvert(), "bag"_a.noconvert(), "scale"_a.noconvert().none(), "rule"_a,
        "rate"_a, "epsilon"_a, "table"_a.noconvert(), "state"_a.noconvert().none(), "stream"_a = 0,
        "threads"_a = 1, "An optimizer's step on the rows of `sorted`");
}

}  // namespace heterps
