#include "exact/step_before.h"

#include <algorithm>
#include <cmath>

#include "problem/chain.h"

namespace heterps::scheduler {
namespace {

constexpr double kGrid = 1.01;  // between the paces at which layers are priced
constexpr double kCoarse = 1.04;
constexpr int kMostPaces = 600;
constexpr size_t kMostSpans = 1'000'000;  // priced at all of them

}  // namespace

StepBefore::StepBefore(const Problem& problem, const std::vector<Span>& spans,
                       const std::vector<std::vector<int32_t>>& ending, double slack, bool fastest,
                       bool coarse)
    : problem_(problem),
      spans_(spans),
      cheapest_(*std::min_element(problem.price.begin(), problem.price.end())) {
  int layers = problem.layers, types = problem.types;
  double low = kInf, high = 0;
  for (const Span& span : spans_) {
    double most = std::min(problem_.limit[span.type], span.terms.most);
    low = std::min(low, Floor(span, most));
    if (span.terms.near < most) low = std::min(low, Floor(span, span.terms.near));
    high = std::max(high, span.terms.Busy(1));
  }
  if (!(low > 0)) low = high * 1e-6;
  high = std::min(high, slack);
  low = std::min(low, high);
  double most = std::clamp<double>(kMostSpans / spans_.size(), 40, kMostPaces);
  bool quick = problem_.staleness == 0 && coarse;
  double count = std::ceil(std::log(high / low) / std::log(quick ? kCoarse : kGrid));
  count = std::min(most, count);
  ratio_ = count > 0 ? std::pow(high / low, 1 / count) : 1;
  low_ = low;
  paces_ = static_cast<int>(count) + 1;
  size_t row = static_cast<size_t>(layers + 1) * types;
  prices_.assign(row * (paces_ + 1), 0);
  for (int n = 0; n < paces_ && !fastest; ++n) {
    // Plans from pace n - 1 to n.
    double tau = low * std::pow(ratio_, n) * (1 + 1e-12);
    double least = low * std::pow(ratio_, std::max(n - 1, 0)) * (1 - 1e-12);
    std::vector<Ways> ways(layers + 1);
    ways[0].cost[0] = 0;
    for (int end = 1; end <= layers; ++end) {
      for (int32_t at : ending[end]) {
        const Span& span = spans_[at];
        const Ways& from = ways[span.first];
        double cost = from.cost[from.After(span.type, problem_.cuts)];
        if (cost == kInf) continue;
        double units = Fewest(span, tau);
        if (units > problem_.limit[span.type]) continue;
        ways[end].Offer(cost + units * problem_.price[span.type], span.type, at);
      }
    }
    for (int end = 0; end <= layers; ++end) {
      for (int type = 0; type < types; ++type) {
        double cost = ways[end].cost[ways[end].After(type, problem_.cuts)];
        prices_[n * row + static_cast<size_t>(end) * types + type] = end == 0       ? 0
                                                                     : cost == kInf ? kInf
                                                                                    : least * cost;
      }
    }
  }
  for (size_t at = 0; at < row; ++at) {
    prices_[paces_ * row + at] = fastest ? 0 : kInf;
    if (at < static_cast<size_t>(types)) prices_[paces_ * row + at] = 0;
    for (int n = paces_ - 1; n >= 0 && !fastest; --n) {
      double& mine = prices_[n * row + at];
      mine = std::min(mine, prices_[(n + 1) * row + at]);
    }
  }
  // The time that a micro-batch takes at least through the layers before.
  trip_.assign(layers + 1, 0);
  double size = problem_.batch / problem_.micro_batches;
  for (int layer = 0; layer < layers; ++layer) {
    double least = kInf;
    for (int type = 0; type < types; ++type) {
      size_t at = problem_.At(layer, type);
      if (problem_.Usable(layer, type)) {
        least = std::min(least, problem_.compute_serial[at] + problem_.compute_parallel[at]);
      }
    }
    trip_[layer + 1] = trip_[layer] + (least < kInf ? least * size : 0);
  }
}

double StepBefore::Floor(const Span& span, double units) const {
  units = std::min(units, span.terms.most);
  double busy = span.terms.Busy(units);
  if (problem_.staleness) return busy;
  double rounds = std::ceil(problem_.micro_batches / units);
  return std::max(busy, (span.terms.cs * units + span.terms.cp) * rounds / problem_.micro_batches);
}

double StepBefore::Fewest(const Span& span, double tau) const {
  double units = FewestUnits(span.terms, tau);
  // More units than micro-batches under way have nothing to do.
  double most = std::min({problem_.limit[span.type], span.terms.most,
                          problem_.micro_batches * (problem_.staleness + 1.0)});
  while (units <= most && (Floor(span, units) > tau || !problem_.Deals(units))) ++units;
  return units <= most ? units : kInf;
}

double StepBefore::Price(double tau, int at, int type) const {
  int n = 0;
  if (tau > low_ && ratio_ > 1) {
    double steps = std::log(tau / low_) / std::log(ratio_);
    n = std::clamp(static_cast<int>(std::ceil(steps - 1e-6)), 0, paces_ - 1);
  }
  size_t row = static_cast<size_t>(problem_.layers + 1) * problem_.types;
  double rest = prices_[n * row + static_cast<size_t>(at) * problem_.types + type];
  // The slowest pace of the grid stands for all that are slower.
  if (rest == kInf && at > 0 && tau > low_ * std::pow(ratio_, paces_ - 1)) rest = cheapest_ * tau;
  return rest;
}

}  // namespace heterps::scheduler
