// quantize and row_cache.
#include <numeric>
#include <set>

#include "check.h"
#include "heterps/quantize.h"
#include "heterps/row_cache.h"

namespace heterps {

void fuzz_quantize() {
  const int64_t rows = one_of({0, 1, 9, 60}), dim = one_of({0, 1, 31, 32, 33, 100});
  auto x = normal<float>(rows * dim, std::pow(10.0, static_cast<double>(below(70)) - 35), below(2));
  for (float& value : x) {
    if (maybe(100)) value = maybe(2) ? NAN : INFINITY;
  }
  if (maybe(3)) std::fill(x.begin(), x.begin() + x.size() / 2, 0.0f);
  Array<int8_t> q(rows * dim), q_cpu(rows * dim);
  Array<float> scale(rows), scale_cpu(rows), back(rows * dim), back_cpu(rows * dim);
  quantize_rows_cpu(rows, dim, x.data(), q_cpu.data(), scale_cpu.data(), 1);
  enqueued([&] { quantize_rows_cuda(rows, dim, x.data(), q.data(), scale.data(), nullptr); }, x);
  same(scale, scale_cpu, 0, "quantize_rows: scale");
  same(q, q_cpu, 0, "quantize_rows: q");
  dequantize_rows_cpu(rows, dim, q.data(), scale.data(), back_cpu.data(), 1);
  enqueued([&] { dequantize_rows_cuda(rows, dim, q.data(), scale.data(), back.data(), nullptr); },
           q, scale);
  same(back, back_cpu, 0, "dequantize_rows");
}

void fuzz_row_cache() {
  const int64_t sets = one_of({1, 3, 20}), ways = one_of({1, 2, 31, 32});
  const bool lfu = maybe(2);
  Array<int64_t> keys(sets * ways), used(sets * ways), score(sets * ways);
  std::fill(keys.begin(), keys.end(), 0);
  std::fill(used.begin(), used.end(), -1);
  std::fill(score.begin(), score.end(), 0);
  Array<int64_t> keys_cpu(keys), used_cpu(used), score_cpu(score);
  const CacheState cache{sets, ways, keys.data(), used.data(), score.data()};
  const CacheState twin{sets, ways, keys_cpu.data(), used_cpu.data(), score_cpu.data()};
  for (int64_t tick = 0; tick < 6; ++tick) {
    std::set<int64_t> drawn;
    for (int64_t i = one_of({0, 1, 30, 90}); i > 0; --i) drawn.insert(below(150) - 20);
    Array<int64_t> wanted(static_cast<int64_t>(drawn.size()));
    std::copy(drawn.begin(), drawn.end(), wanted.begin());
    std::shuffle(wanted.begin(), wanted.end(), chance);
    const int64_t n = wanted.size();
    Array<int64_t> found(n), found_cpu(n);
    row_cache_find_cpu(twin, lfu, tick, n, wanted.data(), found_cpu.data(), 1);
    enqueued(
        [&] { row_cache_find_cuda(cache, lfu, tick, n, wanted.data(), found.data(), nullptr); },
        wanted, keys, used, score);
    same(found, found_cpu, 0, "row_cache_find");

    int64_t missing = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (found[i] < 0) wanted[missing++] = wanted[i];
    }
    Array<int64_t> absent(missing), order(missing), slots(missing), left(missing);
    std::copy_n(wanted.begin(), missing, absent.begin());
    Array<uint8_t> evicted(missing), evicted_cpu(missing);
    Array<int64_t> slots_cpu(missing), left_cpu(missing);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
      return cache_set(absent[a], sets) < cache_set(absent[b], sets);
    });
    row_cache_admit_cpu(twin, lfu, tick, missing, absent.data(), order.data(), slots_cpu.data(),
                        left_cpu.data(), evicted_cpu.data(), 1);
    enqueued(
        [&] {
          row_cache_admit_cuda(cache, lfu, tick, missing, absent.data(), order.data(), slots.data(),
                               left.data(), evicted.data(), nullptr);
        },
        absent, order, keys, used, score);
    same(slots, slots_cpu, 0, "row_cache_admit: slots");
    same(left, left_cpu, 0, "row_cache_admit: left");
    same(evicted, evicted_cpu, 0, "row_cache_admit: evicted");
    same(keys, keys_cpu, 0, "row_cache: keys");
    same(used, used_cpu, 0, "row_cache: used");
    same(score, score_cpu, 0, "row_cache: score");
  }
}

}  // namespace heterps
