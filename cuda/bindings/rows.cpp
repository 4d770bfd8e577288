// Python bindings of what works on rows of embedding tables (see arrays.h).
#include "arrays.h"
#include "heterps/embedding.h"
#include "heterps/quantize.h"
#include "heterps/row_cache.h"

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

CacheState cache_of(const Output& keys, const Output& used, const Output& score, int64_t ways) {
  const int64_t slots = keys.ndim() == 1 ? static_cast<int64_t>(keys.shape(0)) : 0;
  const int device = keys.device_type();
  if (ways < 1 || ways > kMostWays || slots < ways || slots % ways != 0) {
    throw nb::value_error("ways: expected 1 to 32, of which the slots are a multiple");
  }
  check(keys, "cache_keys", nb::dtype<int64_t>(), device, {slots});
  check(used, "used", nb::dtype<int64_t>(), device, {slots});
  check(score, "score", nb::dtype<int64_t>(), device, {slots});
  return {slots / ways, ways, data<int64_t>(keys), data<int64_t>(used), data<int64_t>(score)};
}

void row_cache_find(const Output& cache_keys, const Output& used, const Output& score, int64_t ways,
                    bool lfu, int64_t tick, const Input& keys, const Output& slots,
                    [[maybe_unused]] uintptr_t stream, int threads) {
  const CacheState cache = cache_of(cache_keys, used, score, ways);
  const int64_t n = size_of(keys, "keys", 0, 1);
  const bool on_cuda = is_cuda(keys);
  check(keys, "keys", nb::dtype<int64_t>(), cache_keys.device_type(), {n});
  check(slots, "slots", nb::dtype<int64_t>(), cache_keys.device_type(), {n});
  nb::gil_scoped_release release;
  if (!on_cuda) {
    return row_cache_find_cpu(cache, lfu, tick, n, data<int64_t>(keys), data<int64_t>(slots),
                              threads);
  }
#ifdef HETERPS_WITH_CUDA
  row_cache_find_cuda(cache, lfu, tick, n, data<int64_t>(keys), data<int64_t>(slots),
                      stream_of(stream));
#endif
}

void row_cache_admit(const Output& cache_keys, const Output& used, const Output& score,
                     int64_t ways, bool lfu, int64_t tick, const Input& keys, const Input& order,
                     const Output& slots, const Output& left, const Output& evicted,
                     [[maybe_unused]] uintptr_t stream, int threads) {
  const CacheState cache = cache_of(cache_keys, used, score, ways);
  const int64_t n = size_of(keys, "keys", 0, 1);
  const int device = cache_keys.device_type();
  const bool on_cuda = is_cuda(keys);
  check(keys, "keys", nb::dtype<int64_t>(), device, {n});
  check(order, "order", nb::dtype<int64_t>(), device, {n});
  check(slots, "slots", nb::dtype<int64_t>(), device, {n});
  check(left, "left", nb::dtype<int64_t>(), device, {n});
  check(evicted, "evicted", nb::dtype<uint8_t>(), device, {n});
  nb::gil_scoped_release release;
  if (!on_cuda) {
    return row_cache_admit_cpu(cache, lfu, tick, n, data<int64_t>(keys), data<int64_t>(order),
                               data<int64_t>(slots), data<int64_t>(left), data<uint8_t>(evicted),
                               threads);
  }
#ifdef HETERPS_WITH_CUDA
  row_cache_admit_cuda(cache, lfu, tick, n, data<int64_t>(keys), data<int64_t>(order),
                       data<int64_t>(slots), data<int64_t>(left), data<uint8_t>(evicted),
                       stream_of(stream));
#endif
}

}  // namespace

void bind_rows(nb::module_& m) {
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
  m.def("quantize_rows", &quantize_rows, "x"_a.noconvert(), "q"_a.noconvert(),
        "scale"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
  m.def("dequantize_rows", &dequantize_rows, "q"_a.noconvert(), "scale"_a.noconvert(),
        "x"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
  m.def("row_cache_find", &row_cache_find, "cache_keys"_a.noconvert(), "used"_a.noconvert(),
        "score"_a.noconvert(), "ways"_a, "lfu"_a, "tick"_a, "keys"_a.noconvert(),
        "slots"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
  m.def("row_cache_admit", &row_cache_admit, "cache_keys"_a.noconvert(), "used"_a.noconvert(),
        "score"_a.noconvert(), "ways"_a, "lfu"_a, "tick"_a, "keys"_a.noconvert(),
        "order"_a.noconvert(), "slots"_a.noconvert(), "left"_a.noconvert(), "evicted"_a.noconvert(),
        "stream"_a = 0, "threads"_a = 1);
  m.def(
      "row_cache_set",
      [](const Input& keys, int64_t sets, const Output& out) {
        const int64_t n = size_of(keys, "keys", 0, 1);
        check(keys, "keys", nb::dtype<int64_t>(), nb::device::cpu::value, {n});
        check(out, "out", nb::dtype<int64_t>(), nb::device::cpu::value, {n});
        if (sets < 1) throw nb::value_error("sets: expected at least 1");
        for (int64_t i = 0; i < n; ++i) {
          data<int64_t>(out)[i] = cache_set(data<int64_t>(keys)[i], sets);
        }
      },
      "keys"_a.noconvert(), "sets"_a, "out"_a.noconvert());
}

}  // namespace heterps
