#include "exact/step_relaxation.h"

#include <cmath>
#include <queue>

namespace heterps::scheduler {
namespace {

constexpr int kCells = 64, kMostCells = 256;  // by the trip before
constexpr int kOwed = 8;                      // and by what sums before take longer
constexpr size_t kMostChoices = 300'000;      // beyond there is no bound: a box would take seconds
constexpr double kFine = 1e-3;                // boxes no larger than this get more cells
constexpr double kRounding = 1 + 1e-9;        // of sums

}  // namespace

// What falls into it: the two cheapest ways, whose last stages are on different types.
struct StepRelaxation::Cell {
  double least = kInf, most = 0;  // trip through the stages before
  double owed = kInf;
  double price[2] = {kInf, kInf};
  int32_t type[2] = {-1, -1};
  From from[2] = {};

  void Offer(double value, double shortest, double longest, double owes, int32_t kind,
             const From& how) {
    least = std::min(least, shortest);
    owed = std::min(owed, owes);
    most = std::max(most, longest);
    if (value < price[0]) {
      if (kind != type[0]) price[1] = price[0], type[1] = type[0], from[1] = from[0];
      price[0] = value, type[0] = kind, from[0] = how;
    } else if (kind != type[0] && value < price[1]) {
      price[1] = value, type[1] = kind, from[1] = how;
    }
  }
};

StepRelaxation::StepRelaxation(const Problem& problem, const std::vector<Span>& spans, double slack)
    : problem_(problem),
      spans_(spans),
      slack_(slack),
      beginning_(problem.layers),
      trips_(problem.layers + 1),
      forth_(problem.layers + 1) {
  double size = problem.batch / problem.micro_batches;
  std::vector<double> trip(problem.layers, kInf), forward(problem.layers, kInf);
  for (int layer = 0; layer < problem.layers; ++layer) {
    for (int type = 0; type < problem.types; ++type) {
      if (!problem.Usable(layer, type)) continue;
      size_t at = problem.At(layer, type);
      double busy = problem.compute_serial[at] + problem.compute_parallel[at];
      trip[layer] = std::min(trip[layer], busy * size);
      forward[layer] = std::min(forward[layer], busy * problem.forward_share[at] * size);
      if (busy > 0) share_ = std::min(share_, problem.forward_share[at]);
    }
    forth_[layer + 1] = forth_[layer] + forward[layer];
  }
  for (int layer = problem.layers; layer-- > 0;) trips_[layer] = trips_[layer + 1] + trip[layer];
  begin_.push_back(0);
  for (size_t n = 0; n < spans.size() && choices_.size() <= kMostChoices; ++n) {
    beginning_[spans[n].first].push_back(static_cast<int32_t>(n));
    Add(spans[n]);
    begin_.push_back(choices_.size());
  }
}

// Lists the units that are worth having: each more of them must ease something.
void StepRelaxation::Add(const Span& span) {
  double most = std::min(
      {problem_.limit[span.type], span.terms.most, static_cast<double>(problem_.micro_batches)});
  size_t first = choices_.size();
  for (int units = 1; units <= most; ++units) {
    StepStage stage = StageAt(problem_, span.terms, units);
    double rounds = Rounds(problem_.micro_batches, units), busy = rounds * stage.Busy();
    Choice made;
    made.units = units;
    made.price = units * problem_.price[span.type];
    made.trip = stage.Busy() + stage.cross + stage.way;
    made.slowest = span.terms.Busy(units) * problem_.batch;
    made.alone = std::max(busy, stage.Busy() + rounds * stage.cross);
    made.again = (rounds - 1) * std::max(stage.forward, stage.backward);
    made.sum = stage.sync;
    bool worth = true;
    for (size_t n = first; n < choices_.size() && worth; ++n) {
      const Choice& other = choices_[n];
      worth = made.slowest < other.slowest || made.alone < other.alone ||
              made.again < other.again || made.sum < other.sum;
    }
    if (worth) choices_.push_back(made);
  }
}

// What the cheapest chain of a box costs an hour; infinite where it is at least `most`.
double StepRelaxation::Price(const Box& box, double most, Chain* chain) const {
  double step = box.step[1] * kRounding, trip = box.trip[0], width = box.trip[1] / box.cells;
  if (trip > step) return kInf;
  int layers = problem_.layers, count = box.cells * kOwed;
  std::vector<Cell> cells(static_cast<size_t>(layers + 1) * count);
  cells[0].least = cells[0].owed = cells[0].price[0] = 0;
  for (int at = 0; at < layers; ++at) {
    for (int c = 0; c < count; ++c) {
      const Cell& here = cells[static_cast<size_t>(at) * count + c];
      if (here.least == kInf) continue;
      // The forward part of the trip so far, and what that is more than the trip, at least.
      double ahead = std::max(share_ * here.least, forth_[at]);
      double late = std::max((share_ - 1) * here.most, forth_[at] - here.most);
      for (int32_t n : beginning_[at]) {
        const Span& span = spans_[n];
        double left = box.trip[1] * kRounding - trips_[span.last + 1] - here.least, before = 0;
        int way = !problem_.cuts && here.type[0] == span.type ? 1 : 0;
        for (size_t now = begin_[n]; now < begin_[n + 1]; ++now) {
          const Choice& choice = choices_[now];
          double price = here.price[way] + choice.price;
          if (price >= most || choice.trip > left) break;
          if (choice.trip <= before || choice.slowest > step) continue;
          if (ahead + choice.sum + choice.alone > step) continue;
          double owed = std::max(here.owed, late + choice.sum);
          if (std::max(here.least + choice.alone, trip + choice.again) + owed > step) continue;
          before = choice.trip;
          double least = here.least + choice.trip;
          int to = std::min(static_cast<int>(least / width), box.cells - 1) * kOwed +
                   std::min(static_cast<int>(owed / step * kOwed), kOwed - 1);
          cells[static_cast<size_t>(span.last + 1) * count + to].Offer(
              price, least, here.most + choice.trip, owed, span.type,
              {n, choice.units, static_cast<int16_t>(c), static_cast<int16_t>(way)});
        }
      }
    }
  }
  const Cell* last = &cells[static_cast<size_t>(layers) * count];
  int best = 0;
  for (int c = 1; c < count; ++c) {
    if (last[c].price[0] < last[best].price[0]) best = c;
  }
  double price = last[best].price[0];
  *chain = {};
  for (int at = layers, c = best, way = 0; price < kInf && at > 0;) {
    const From& from = cells[static_cast<size_t>(at) * count + c].from[way];
    chain->spans.insert(chain->spans.begin(), from.span);
    chain->units.insert(chain->units.begin(), from.units);
    at = spans_[from.span].first, c = from.cell, way = from.way;
  }
  return price;
}

double StepRelaxation::Bound(const double* incumbent,
                             const std::function<void(const Chain&)>& offer,
                             const std::function<bool()>& done) {
  double cheapest = *std::min_element(problem_.price.begin(), problem_.price.end());
  double least = trips_[0], most = slack_ * problem_.batch;
  if (cheapest > 0) most = std::min(most, *incumbent / cheapest * problem_.batch);
  if (choices_.size() > kMostChoices || !(least > 0) || !(most < kInf)) return 0;
  std::priority_queue<Box> open;
  auto evaluate = [&](Box box) {
    if (box.step[0] > box.step[1] || box.trip[0] > box.trip[1]) return;
    double ps = problem_.PsUnits(problem_.batch / box.step[1] / kRounding) *
                problem_.price[problem_.ps_type];
    double limit =
        std::min(problem_.max_price * kRounding, *incumbent * problem_.batch / box.step[0]);
    Chain chain;
    double price = ps + Price(box, limit - ps, &chain);
    if (price == kInf) return;
    box.value = std::max(box.value, box.step[0] / problem_.batch * price);
    open.push(box);
    offer(chain);
  };
  evaluate({0, {least, most * kRounding}, {least, most * kRounding}, kCells});
  while (!open.empty()) {
    Box box = open.top();
    if (box.value >= *incumbent) break;
    double tall = std::log(box.step[1] / box.step[0]);
    double wide = (box.trip[1] - box.trip[0]) / box.step[1];
    bool fine = std::max(tall, wide) < kFine;
    if (done() || (fine && box.cells == kMostCells)) return box.value / kRounding;
    open.pop();
    Box one = box, other = box;
    if (fine) {
      one.cells *= 2;
      evaluate(one);
      continue;
    }
    if (tall >= wide) {
      one.step[1] = other.step[0] = std::sqrt(box.step[0] * box.step[1]);
      one.trip[1] = std::min(one.trip[1], one.step[1]);
    } else {
      one.trip[1] = other.trip[0] = (box.trip[0] + box.trip[1]) / 2;
      other.step[0] = std::max(other.step[0], other.trip[0]);
    }
    evaluate(one);
    evaluate(other);
  }
  return *incumbent;
}

}  // namespace heterps::scheduler
