#include "heterps/gather.h"

#include <numeric>

#include "check.h"

namespace heterps {

void fuzz_gather() {
  each_dtype([]<typename T>(T*, DType dtype, double) {
    using S = Sum<T>;
    const int64_t tokens = one_of({0, 1, 5, 70}), k = 1 + below(3);
    const int64_t dim = one_of({1, 3, 8, 16, 33, 72, 300, 2100});
    const int64_t rows = tokens * k == 0 ? 0 : 1 + below(tokens * k);
    const GatherShape shape{tokens, rows, k, dim};
    const int64_t shift = below(2);  // off the alignment that wide packs need
    auto x = normal<T>(tokens * dim, 1.0, shift), y = normal<T>(rows * dim, 1.0, below(2));
    if (x.size() > 0) x[below(x.size())] = static_cast<T>(NAN);
    const auto weights = normal<S>(tokens * k);
    const S* w = maybe(2) ? nullptr : weights.data();
    Array<int64_t> kept(tokens * k), order(rows), place(tokens * k);  // pairs without repetition
    std::iota(kept.begin(), kept.end(), 0);
    std::shuffle(kept.begin(), kept.end(), chance);
    std::copy_n(kept.begin(), rows, order.begin());
    std::fill(place.begin(), place.end(), -1);
    for (int64_t p = 0; p < rows; ++p) place[order[p]] = p;
    auto inverse = rows > 0 ? indices(tokens * k, rows) : Array<int64_t>(0);
    for (int64_t& position : inverse) position = maybe(4) ? -1 : position;  // dropped

    Array<T> out(rows * dim, below(2)), out_cpu(rows * dim);
    gather_rows_cpu(shape, dtype, x.data(), w, order.data(), out_cpu.data(), 1);
    enqueued(
        [&] { gather_rows_cuda(shape, dtype, x.data(), w, place.data(), out.data(), nullptr); }, x,
        weights, place);
    same(out, out_cpu, 0, "gather_rows");

    Array<T> sum(tokens * dim, below(2)), sum_cpu(tokens * dim);
    gather_sum_cpu(shape, dtype, y.data(), w, inverse.data(), sum_cpu.data(), 1);
    enqueued(
        [&] { gather_sum_cuda(shape, dtype, y.data(), w, inverse.data(), sum.data(), nullptr); }, y,
        weights, inverse);
    same(sum, sum_cpu, 0, "gather_sum");

    Array<S> dots(tokens * k), dots_cpu(tokens * k);
    gather_dot_cpu(shape, dtype, x.data(), y.data(), inverse.data(), dots_cpu.data(), 1);
    enqueued(
        [&] {
          gather_dot_cuda(shape, dtype, x.data(), y.data(), inverse.data(), dots.data(), nullptr);
        },
        x, y, inverse);
    same(dots, dots_cpu, std::is_same_v<T, double> ? 1e-13 : 1e-5, "gather_dot");
  });
}

}  // namespace heterps
