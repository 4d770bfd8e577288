#include "heterps/grouped_ffn.h"

#include <algorithm>
#include <vector>

#include "check.h"
#include "cuda_runtime.h"

namespace heterps {
namespace {

// Sizes of groups: tiles are of 64 rows or of 128.
std::vector<int64_t> counts_of_chance() {
  switch (below(4)) {
    case 0:
      return {0, 0};
    case 1:
      return {0, one_of({63, 64, 65, 128, 129, 270}), 0};  // all in one
    case 2:
      return {64, 0, 64, 1};
    default: {
      std::vector<int64_t> counts(1 + (maybe(8) ? 40 : below(7)));  // 32 are looked at together
      for (int64_t& count : counts) count = one_of({0, 1, 5, 40, 70});
      return counts;
    }
  }
}

template <typename T>
void fuzz(DType dtype, double tolerance) {
  emulate::hopper = maybe(2);
  const bool fits = emulate::hopper && !maybe(4);  // what Hopper's products take
  const auto counts = counts_of_chance();
  Array<int64_t> offsets(static_cast<int64_t>(counts.size()) + 1);
  offsets[0] = 0;
  for (size_t e = 0; e < counts.size(); ++e) offsets[e + 1] = offsets[e] + counts[e];
  const int64_t groups = static_cast<int64_t>(counts.size()), rows = offsets[groups];
  const int64_t dim = fits ? one_of({8, 16, 136}) : one_of({1, 8, 31, 40, 64, 70, 136, 200});
  const int64_t hidden = fits ? one_of({8, 40, 152}) : one_of({1, 7, 32, 36, 64, 66, 72, 152});
  const FfnShape shape{rows, groups, dim, hidden, static_cast<Activation>(below(4))};
  const int64_t inner = shape.inner(), shift = fits ? 0 : below(2);
  auto x = normal<T>(rows * dim, 1.0, shift);
  const auto w1 = normal<T>(groups * dim * inner, std::pow(dim, -0.5), shift);
  const auto w2 = normal<T>(groups * hidden * dim, std::pow(hidden, -0.5));
  const auto grad = normal<T>(rows * dim);
  if (rows > 0 && maybe(4)) x[below(x.size())] = static_cast<T>(NAN);

  Array<T> pre(rows * inner), act(rows * hidden), out(rows * dim, shift);
  Array<T> pre_cpu(rows * inner), act_cpu(rows * hidden), out_cpu(rows * dim);
  FfnArrays mine{x.data(),   offsets.data(), w1.data(), w2.data(),
                 pre.data(), act.data(),     out.data()};
  Array<uint8_t> workspace(grouped_ffn_workspace(shape, dtype) + 128);
  const auto at = reinterpret_cast<uintptr_t>(workspace.data());
  if (workspace.size() > 128) mine.workspace = workspace.data() + (128 - at % 128) % 128;
  FfnArrays theirs = mine;
  theirs.pre = pre_cpu.data(), theirs.act = act_cpu.data(), theirs.out = out_cpu.data();
  grouped_ffn_cpu(shape, dtype, theirs, 1);
  enqueued([&] { grouped_ffn_cuda(shape, dtype, mine, nullptr); }, x, offsets, w1, w2);
  act.check("grouped_ffn: act");
  same(pre, pre_cpu, tolerance, "grouped_ffn: pre");
  same(out, out_cpu, tolerance, "grouped_ffn: out");

  Array<T> grad_pre(rows * inner), grad_rows(rows * dim), grad_w1(w1.size()), grad_w2(w2.size());
  Array<T> pre_scratch(rows * inner), rows_cpu(rows * dim), w1_cpu(w1.size()), w2_cpu(w2.size());
  const bool wants_rows = !maybe(4), wants_weights = !maybe(4);
  const auto gradients = [&](Array<T>& pre, Array<T>& rows, Array<T>& w1, Array<T>& w2) {
    return FfnGradients{grad.data(), pre.data(), wants_rows ? rows.data() : nullptr,
                        wants_weights ? w1.data() : nullptr, wants_weights ? w2.data() : nullptr};
  };
  grouped_ffn_backward_cpu(shape, dtype, theirs, gradients(pre_scratch, rows_cpu, w1_cpu, w2_cpu),
                           1);
  enqueued(
      [&] {
        grouped_ffn_backward_cuda(shape, dtype, mine,
                                  gradients(grad_pre, grad_rows, grad_w1, grad_w2), nullptr);
      },
      x, offsets, w1, w2, grad, pre);
  grad_pre.check("grouped_ffn: scratch");
  if (wants_rows) same(grad_rows, rows_cpu, tolerance, "grouped_ffn: the gradient of rows");
  if (!wants_weights) return;
  same(grad_w1, w1_cpu, tolerance, "grouped_ffn: the gradient of w1");
  same(grad_w2, w2_cpu, tolerance, "grouped_ffn: the gradient of w2");
}

}  // namespace

void fuzz_grouped_ffn() {
  each_dtype([]<typename T>(T*, DType dtype, double tolerance) { fuzz<T>(dtype, tolerance); });
}

}  // namespace heterps
