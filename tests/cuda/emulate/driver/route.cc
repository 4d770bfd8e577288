#include "heterps/route.h"

#include <numeric>

#include "check.h"
#include "heterps/route.cuh"

namespace heterps {
namespace {

Array<float> logits_of_chance(int64_t tokens, int64_t experts) {
  auto logits = normal<float>(tokens * experts);
  const int64_t kind = below(4);
  for (int64_t i = 0; i < logits.size(); ++i) {
    if (kind == 0) logits[i] = static_cast<float>(below(3));              // many tie
    if (kind == 1) logits[i] = i % experts == experts / 2 ? 9.0f : 0.0f;  // all choose one
    if (kind == 2 && maybe(3)) logits[i] = maybe(2) ? NAN : -INFINITY;
  }
  return logits;
}

// Scans longer than a block, on their own: routing that has as many tiles would take seconds.
void fuzz_scans() {
  const int64_t experts = one_of({1, 2, 255, 256, 257, 700});
  const int64_t tiles = one_of({1, 5, 256, 300, 520}) / (experts > 2 ? 100 : 1) + 1;
  Array<int64_t> counts(experts * tiles), wanted(experts * tiles), offsets(experts + 1);
  Array<int64_t> wanted_offsets(experts + 1);
  for (int64_t& count : counts) count = below(5) << 36;
  wanted_offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t *begin = counts.data() + e * tiles, *end = begin + tiles;
    std::exclusive_scan(begin, end, wanted.data() + e * tiles, int64_t{0});
    wanted_offsets[e + 1] = wanted_offsets[e] + std::accumulate(begin, end, int64_t{0});
  }
  emulate::launch("route_scan_kernel", static_cast<unsigned>(experts), kScanThreads,
                  [&] { route_scan_kernel(counts.data(), tiles, offsets.data()); });
  emulate::launch("route_offsets_kernel", 1, kScanThreads,
                  [&] { route_offsets_kernel(experts, offsets.data()); });
  same(counts, wanted, 0, "route: a scan");
  same(offsets, wanted_offsets, 0, "route: offsets of a scan");
}

}  // namespace

void fuzz_route() {
  fuzz_scans();
  const int64_t experts = one_of({1, 2, 7, 31, 32, 33, 130}), tokens = one_of({0, 1, 63, 300, 700});
  const int64_t k = 1 + below(std::min<int64_t>(experts, 4)), pairs = tokens * k;
  const auto logits = logits_of_chance(tokens, experts);
  Array<int32_t> chosen(pairs), chosen_cpu(pairs);
  Array<int64_t> order(pairs), inverse(pairs), offsets(experts + 1);
  Array<int64_t> order_cpu(pairs), inverse_cpu(pairs), offsets_cpu(experts + 1);
  Array<int64_t> workspace(group_workspace(pairs, experts));
  choose_cpu({logits.data(), tokens, experts, k, chosen_cpu.data()}, 1);
  group_cpu({chosen_cpu.data(), pairs, experts, order_cpu.data(), inverse_cpu.data(),
             offsets_cpu.data()});
  enqueued(
      [&] {
        choose_cuda({logits.data(), tokens, experts, k, chosen.data()}, nullptr);
        group_cuda({chosen.data(), pairs, experts, order.data(), inverse.data(), offsets.data()},
                   workspace.data(), nullptr);
      },
      logits);
  workspace.check("route: workspace");
  same(chosen, chosen_cpu, 0, "route: chosen");
  same(offsets, offsets_cpu, 0, "route: offsets");
  same(order, order_cpu, 0, "route: order");
  same(inverse, inverse_cpu, 0, "route: inverse");
}

}  // namespace heterps
