#include "exact/step_descent.h"

#include "problem/random.h"

namespace heterps::scheduler {
namespace {

constexpr double kHeat = 0.03;      // by which a plan that is gone on from may be dearer, at first
constexpr double kCold = 0.6;       // share of the windows after which none may
constexpr double kHot = 6;          // heats by which one is dearer that is all but never taken
constexpr double kStages = 0.4;     // share of windows of whole stages
constexpr double kNeighbour = 0.5;  // share of windows that go to the type beside them
constexpr double kMore = 0.5;       // share of windows after which another beside it goes elsewhere
constexpr int kLongest = 16;        // layers of a window, but for whole stages

}  // namespace

StepDescent::StepDescent(const Problem& problem, double floor)
    : problem_(problem), units_(problem, floor) {}

void StepDescent::Run(std::vector<int32_t> now, int windows, const Offer& offer,
                      const std::function<bool()>& done) {
  bool fits = false;
  double current = units_.Price(now, kInf, &fits), best = kInf;
  if (fits) best = current, offer(now, units_.units());
  std::vector<int32_t> next;
  for (int n = 0; n < windows && !((n & 15) == 15 && done()); ++n) {
    next = now;
    bool moved = Move(&next, Below(problem_.layers));
    // Where memory is short a stage gives way only together with its neighbours.
    while (Random() < kMore) moved |= Move(&next, near_);
    if (!moved || next == now) continue;
    double heat = kHeat * std::max(0.0, 1 - n / (kCold * windows));
    double price = units_.Price(next, current * (1 + kHot * heat), &fits);
    if (!(price < kInf)) continue;
    if (price > current && !(heat > 0 && Random() < std::exp((1 - price / current) / heat))) {
      continue;
    }
    std::swap(now, next);
    current = price;
    if (fits && price < best) best = price, offer(now, units_.units());
  }
}

bool StepDescent::Move(std::vector<int32_t>* now, int from) {
  int layers = problem_.layers, to = from + 1;
  auto at = [&](int layer) { return (*now)[layer]; };
  if (Random() < kStages) {
    while (from > 0 && at(from - 1) == at(from)) --from;
    while (to < layers && at(to) == at(to - 1)) ++to;
  } else {
    // Short ones more often, and from where a stage begins.
    double share = Random();
    to = std::min(layers, from + 1 + static_cast<int>(share * share * kLongest));
    if (Random() < 0.5) {
      while (from > 0 && at(from - 1) == at(from)) --from;
    }
  }
  int type = Below(problem_.types);
  if (Random() < kNeighbour) {
    bool before = Random() < 0.5;
    if (before ? from == 0 : to == layers) return false;
    type = (before ? at(from - 1) : at(to)) % problem_.types;
  }
  bool other = false;
  for (int layer = from; layer < to; ++layer) {
    if (!problem_.Usable(layer, type)) return false;
    other |= at(layer) != type;
  }
  std::fill(now->begin() + from, now->begin() + to, type);
  near_ = std::clamp(Random() < 0.5 ? from - 1 : to, 0, layers - 1);
  return other;
}

double StepDescent::Random() { return Uniform(&random_); }

}  // namespace heterps::scheduler
