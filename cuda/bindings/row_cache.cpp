#include "heterps/row_cache.h"

#include "arrays.h"

namespace heterps {
namespace {

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

// A key's set, for its caller to order by: on the host.
void row_cache_set(const Input& keys, int64_t sets, const Output& out) {
  const int64_t n = size_of(keys, "keys", 0, 1);
  check(keys, "keys", nb::dtype<int64_t>(), nb::device::cpu::value, {n});
  check(out, "out", nb::dtype<int64_t>(), nb::device::cpu::value, {n});
  if (sets < 1) throw nb::value_error("sets: expected at least 1");
  for (int64_t i = 0; i < n; ++i) {
    data<int64_t>(out)[i] = cache_set(data<int64_t>(keys)[i], sets);
  }
}

}  // namespace

void bind_row_cache(nb::module_& m) {
  m.def("row_cache_find", &row_cache_find, "cache_keys"_a.noconvert(), "used"_a.noconvert(),
        "score"_a.noconvert(), "ways"_a, "lfu"_a, "tick"_a, "keys"_a.noconvert(),
        "slots"_a.noconvert(), "stream"_a = 0, "threads"_a = 1);
  m.def("row_cache_admit", &row_cache_admit, "cache_keys"_a.noconvert(), "used"_a.noconvert(),
        "score"_a.noconvert(), "ways"_a, "lfu"_a, "tick"_a, "keys"_a.noconvert(),
        "order"_a.noconvert(), "slots"_a.noconvert(), "left"_a.noconvert(), "evicted"_a.noconvert(),
        "stream"_a = 0, "threads"_a = 1);
  m.def("row_cache_set", &row_cache_set, "keys"_a.noconvert(), "sets"_a, "out"_a.noconvert());
}

}  // namespace heterps
