#include "heterps/embedding.h"

#include <numeric>

#include "check.h"

namespace heterps {

void fuzz_embedding() {
  each_dtype([]<typename T>(T*, DType dtype, double tolerance) {
    using S = Sum<T>;
    const int64_t rows = one_of({1, 5, 60}), dim = one_of({0, 1, 7, 31, 33, 70});
    const int64_t bags = one_of({0, 1, 4, 40});
    Array<int64_t> offsets(bags + 1);
    offsets[0] = 0;
    for (int64_t b = 0; b < bags; ++b) {
      offsets[b + 1] = offsets[b] + one_of({0, 1, 3, maybe(10) ? 300 : 2});
    }
    const int64_t n = offsets[bags];
    const PoolShape shape{rows, dim, n, bags};
    const auto ids = indices(n, rows);
    Array<int64_t> bag(n), source(n), sorted(n);
    for (int64_t b = 0; b < bags; ++b) std::fill(&bag[offsets[b]], &bag[offsets[b + 1]], b);
    std::iota(source.begin(), source.end(), 0);
    std::stable_sort(source.begin(), source.end(), [&](auto a, auto b) { return ids[a] < ids[b]; });
    for (int64_t p = 0; p < n; ++p) sorted[p] = ids[source[p]];
    const auto weights = normal<S>(n);
    const S* scale = maybe(2) ? nullptr : weights.data();
    auto table = normal<T>(rows * dim, 1.0, below(2)), grad = normal<T>(bags * dim);
    if (table.size() > 0 && maybe(3)) table[below(table.size())] = static_cast<T>(NAN);

    const PoolInputs in{ids.data(), offsets.data(), scale};
    Array<T> out(bags * dim, below(2)), out_cpu(bags * dim);
    embedding_pool_cpu(shape, dtype, in, table.data(), out_cpu.data(), 1);
    enqueued([&] { embedding_pool_cuda(shape, dtype, in, table.data(), out.data(), nullptr); }, ids,
             offsets, weights, table);
    same(out, out_cpu, 0, "embedding_pool");

    const SegmentInputs segments{sorted.data(), source.data(), bag.data(), scale, grad.data()};
    Array<T> sums(n * dim), sums_cpu(n * dim);
    embedding_segments_cpu(shape, dtype, segments, sums_cpu.data(), 1);
    enqueued([&] { embedding_segments_cuda(shape, dtype, segments, sums.data(), nullptr); }, sorted,
             source, bag, weights, grad);
    same(sums, sums_cpu, 0, "embedding_segments");

    for (RowRule rule : {RowRule::kSgd, RowRule::kAdagrad, RowRule::kRowwiseAdagrad}) {
      Array<T> mine(table), theirs(table);
      Array<S> state(rule == RowRule::kRowwiseAdagrad ? rows : rows * dim);
      std::fill(state.begin(), state.end(), S(0.1));
      Array<S> state_cpu(state);
      const RowOptimizer optimizer{rule, 0.5, 1e-8};
      embedding_update_cpu(shape, dtype, segments, optimizer, theirs.data(), state_cpu.data(), 1);
      enqueued(
          [&] {
            embedding_update_cuda(shape, dtype, segments, optimizer, mine.data(), state.data(),
                                  nullptr);
          },
          sorted, source, bag, weights, grad, mine, state);
      same(mine, theirs, tolerance, "embedding_update: table");
      same(state, state_cpu, std::is_same_v<T, double> ? 1e-13 : 1e-5, "embedding_update: state");
    }
  });
}

}  // namespace heterps
