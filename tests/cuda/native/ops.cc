// The ops other than grouped_ffn on arrays that end where their memory does, to be built with a
// sanitizer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "arrays.h"
#include "heterps/embedding.h"
#include "heterps/gather.h"
#include "heterps/quantize.h"
#include "heterps/route.h"
#include "heterps/row_cache.h"

namespace {

using namespace heterps;

template <typename T>
void embeddings(DType dtype, int64_t table_rows, int64_t dim, const std::vector<int64_t>& counts) {
  using S = Sum<T>;
  const auto offsets = offsets_of(counts);
  const int64_t n = offsets.back(), bags = static_cast<int64_t>(counts.size());
  std::vector<int64_t> ids(n), bag(n), source(n), sorted(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int64_t>(chance() % table_rows);
  for (int64_t b = 0; b < bags; ++b) std::fill(&bag[0] + offsets[b], &bag[0] + offsets[b + 1], b);
  std::iota(source.begin(), source.end(), 0);
  std::stable_sort(source.begin(), source.end(), [&](auto a, auto b) { return ids[a] < ids[b]; });
  for (int64_t i = 0; i < n; ++i) sorted[i] = ids[source[i]];
  const PoolShape shape{table_rows, dim, n, bags};
  const auto scale = random<S>(n);
  const auto grad = random<T>(bags * dim);
  auto table = random<T>(table_rows * dim);
  std::vector<T> out(bags * dim), rows(n * dim);
  embedding_pool_cpu(shape, dtype, {ids.data(), offsets.data(), scale.data()}, table.data(),
                     out.data(), 1);
  const SegmentInputs in{sorted.data(), source.data(), bag.data(), scale.data(), grad.data()};
  embedding_segments_cpu(shape, dtype, in, rows.data(), 1);
  std::vector<S> squares(table_rows * dim, S{0}), means(table_rows, S{0});
  embedding_update_cpu(shape, dtype, in, {RowRule::kSgd, 0.1, 1e-8}, table.data(), nullptr, 1);
  embedding_update_cpu(shape, dtype, in, {RowRule::kAdagrad, 0.1, 1e-8}, table.data(),
                       squares.data(), 1);
  embedding_update_cpu(shape, dtype, in, {RowRule::kRowwiseAdagrad, 0.1, 1e-8}, table.data(),
                       means.data(), 1);
  for (S mean : means) expect(std::isfinite(mean), "embedding_update: a state that is no number");
}

template <typename T>
void gathers(DType dtype, int64_t tokens, int64_t experts, int64_t k, int64_t dim) {
  const int64_t pairs = tokens * k;
  auto logits = random<float>(tokens * experts);
  if (!logits.empty()) logits[0] = NAN;
  std::vector<int32_t> chosen(pairs);
  std::vector<int64_t> order(pairs), inverse(pairs), offsets(experts + 1);
  choose_cpu({logits.data(), tokens, experts, k, chosen.data()}, 2);
  group_cpu({chosen.data(), pairs, experts, order.data(), inverse.data(), offsets.data()});
  expect(offsets.back() == pairs, "route: a pair without an expert");
  for (int64_t i = 0; i < pairs; ++i) expect(order[inverse[i]] == i, "route: no inverse");
  const GatherShape shape{tokens, pairs, k, dim};
  const auto x = random<T>(tokens * dim);
  const auto w = random<Sum<T>>(pairs);
  std::vector<T> rows(pairs * dim), back(tokens * dim);
  std::vector<Sum<T>> dots(pairs);
  gather_rows_cpu(shape, dtype, x.data(), w.data(), order.data(), rows.data(), 1);
  gather_sum_cpu(shape, dtype, rows.data(), w.data(), inverse.data(), back.data(), 1);
  gather_dot_cpu(shape, dtype, x.data(), rows.data(), inverse.data(), dots.data(), 1);
}

template <typename T>
void all_of(DType dtype) {
  embeddings<T>(dtype, 9, 5, {3, 0, 14, 1});
  embeddings<T>(dtype, 3, 0, {2, 1});
  embeddings<T>(dtype, 1, 3, {});
  gathers<T>(dtype, 19, 6, 2, 11);
  gathers<T>(dtype, 4, 3, 3, 0);
  gathers<T>(dtype, 0, 3, 1, 4);
}

void quantized(int64_t rows, int64_t dim) {
  auto x = random<float>(rows * dim);
  if (!x.empty()) x[0] = INFINITY;
  std::vector<int8_t> q(rows * dim);
  std::vector<float> scale(rows), back(rows * dim);
  quantize_rows_cpu(rows, dim, x.data(), q.data(), scale.data(), 1);
  dequantize_rows_cpu(rows, dim, q.data(), scale.data(), back.data(), 1);
}

void cached(int64_t sets, int64_t ways) {
  std::vector<int64_t> keys(sets * ways, 0), used(sets * ways, -1), score(sets * ways, 0);
  const CacheState cache{sets, ways, keys.data(), used.data(), score.data()};
  for (int64_t tick = 0; tick < 20; ++tick) {
    std::vector<int64_t> wanted(7), order(7), slots(7), left(7);
    std::vector<uint8_t> evicted(7);
    std::iota(wanted.begin(), wanted.end(), static_cast<int64_t>(chance() % 50) * 7);
    std::iota(order.begin(), order.end(), 0);
    row_cache_find_cpu(cache, tick % 2, tick, 7, wanted.data(), slots.data(), 1);
    row_cache_admit_cpu(cache, tick % 2, tick, 7, wanted.data(), order.data(), slots.data(),
                        left.data(), evicted.data(), 1);
  }
}

}  // namespace

int main() {
  all_of<double>(DType::kFloat64);
  all_of<float>(DType::kFloat32);
  all_of<Float16>(DType::kFloat16);
  all_of<BFloat16>(DType::kBFloat16);
  quantized(5, 9);
  quantized(3, 0);
  cached(4, 3);
  return 0;
}
