#include "exact/step_relaxation.h"

#include <cmath>

#include "problem/chain.h"

namespace heterps::scheduler {
namespace {

constexpr int kCells = 64, kMostCells = 256;  // by the trip before
constexpr int kOwed = 8;                      // and by what sums before take longer
constexpr size_t kMostChoices = 300'000;      // beyond there is no bound: a box would take seconds
constexpr double kStride = 0.7, kBeyond = 1.1;  // of a subgradient step
constexpr int kTurns = 6;                       // of them for all plans together
constexpr size_t kTables = 256;                 // of boxes that are left open
constexpr double kFine = 1e-3;                  // boxes no larger than this are not split
constexpr double kRounding = 1 + 1e-9;          // of sums
constexpr double kTall = 0.03, kWide = 0.1;     // boxes no larger than this are looked at closer

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

StepRelaxation::StepRelaxation(const Problem& problem, const std::vector<Span>& spans, double slack,
                               size_t labels)
    : problem_(problem),
      spans_(spans),
      slack_(slack),
      beginning_(problem.layers),
      labels_(problem, spans, ahead_, labels) {
  ahead_.trips.assign(problem.layers + 1, 0);
  ahead_.forth.assign(problem.layers + 1, 0);
  double size = problem.batch / problem.micro_batches;
  std::vector<double> trip(problem.layers, kInf), forward(problem.layers, kInf);
  for (int layer = 0; layer < problem.layers; ++layer) {
    for (int type = 0; type < problem.types; ++type) {
      if (!problem.Usable(layer, type)) continue;
      size_t at = problem.At(layer, type);
      double busy = problem.compute_serial[at] + problem.compute_parallel[at];
      trip[layer] = std::min(trip[layer], busy * size);
      forward[layer] = std::min(forward[layer], busy * problem.forward_share[at] * size);
      if (busy > 0) ahead_.share = std::min(ahead_.share, problem.forward_share[at]);
    }
    ahead_.forth[layer + 1] = ahead_.forth[layer] + forward[layer];
  }
  for (int layer = problem.layers; layer-- > 0;)
    ahead_.trips[layer] = ahead_.trips[layer + 1] + trip[layer];
  begin_.push_back(0);
  for (size_t n = 0; n < spans.size() && choices_.size() <= kMostChoices; ++n) {
    beginning_[spans[n].first].push_back(static_cast<int32_t>(n));
    Add(spans[n]);
    begin_.push_back(choices_.size());
  }
}

Choice StepRelaxation::ChoiceOf(const Span& span, int units) const {
  StepStage stage = StageAt(problem_, span.terms, units);
  double rounds = Rounds(problem_.micro_batches, units), busy = rounds * stage.Busy();
  Choice made;
  made.units = units;
  made.price = units * problem_.price[span.type];
  made.trip = made.counted = stage.Busy() + stage.cross + stage.way;
  made.slowest = span.terms.Busy(units) * problem_.batch;
  made.alone = std::max(busy, stage.Busy() + rounds * stage.cross);
  made.again = (rounds - 1) * std::max(stage.forward, stage.backward);
  made.sum = stage.End();
  made.stage = stage;
  made.forth = stage.forward + (stage.cross + stage.way) / 2;
  return made;
}

// Lists the units that are worth having: each more of them must ease something.
void StepRelaxation::Add(const Span& span) {
  double most = std::min(
      {problem_.limit[span.type], span.terms.most, static_cast<double>(problem_.micro_batches)});
  size_t first = choices_.size();
  for (int units = 1; units <= most; ++units) {
    if (!problem_.Deals(units)) continue;
    Choice made = ChoiceOf(span, units);
    bool worth = true;
    for (size_t n = first; n < choices_.size() && worth; ++n) worth = made.Eases(choices_[n]);
    if (worth) choices_.push_back(made);
  }
}

// Lists every number of units, each counted as the fewer that keep its time where there are such.
void StepRelaxation::AddEvery() {
  if (!every_begin_.empty()) return;
  every_begin_.push_back(0);
  for (size_t n = 0; n < spans_.size(); ++n) {
    const Span& span = spans_[n];
    double most = std::min(
        {problem_.limit[span.type], span.terms.most, static_cast<double>(problem_.micro_batches)});
    for (int units = 1; units <= most; ++units) {
      if (!problem_.Deals(units)) continue;
      every_.push_back(ChoiceOf(span, units));
      every_.back().counted = Trip(static_cast<int32_t>(n), units);
    }
    every_begin_.push_back(every_.size());
  }
}

// Leaves the choices that a plan of a box may have, at the box's prices.
void StepRelaxation::Open(const Box& box, const std::vector<Choice>& choices,
                          const std::vector<size_t>& begin) {
  double step = box.step[1] * kRounding, trip = box.trip[0];
  open_.clear();
  opened_.assign(1, 0);
  for (size_t n = 0; n < spans_.size(); ++n) {
    double before = ahead_.Before(spans_[n].first), after = ahead_.trips[spans_[n].last + 1];
    for (size_t now = begin[n]; now < begin[n + 1]; ++now) {
      const Choice& choice = choices[now];
      if (choice.slowest > step || before + choice.alone > step || trip + choice.again > step ||
          before + choice.counted + after > box.trip[1] * kRounding) {
        continue;
      }
      open_.push_back(choice);
      open_.back().price += choice.units * box.weight[spans_[n].type];
    }
    opened_.push_back(open_.size());
  }
}

// What the cheapest chain of a box costs an hour; infinite where it is at least `most`.
double StepRelaxation::Price(const Box& box, double most, Chain* chain, Left* left,
                             TripWays* ways) {
  double step = box.step[1] * kRounding, trip = box.trip[0], width = box.trip[1] / box.cells;
  double owe = std::max(step - trip, step * 1e-9);  // sums before may take so much longer
  if (trip > step) return kInf;
  int layers = problem_.layers, count = box.cells * kOwed;
  Open(box, choices_, begin_);
  rest_.assign(layers + 1, kInf);
  rest_[layers] = 0;
  for (int at = layers; at-- > 0;) {
    for (int32_t n : beginning_[at]) {
      if (opened_[n] == opened_[n + 1]) continue;
      rest_[at] = std::min(rest_[at], open_[opened_[n]].price + rest_[spans_[n].last + 1]);
    }
  }
  if (rest_[0] >= most) return kInf;
  std::vector<Cell> cells(static_cast<size_t>(layers + 1) * count);
  cells[0].least = cells[0].owed = cells[0].price[0] = 0;
  for (int at = 0; at < layers; ++at) {
    for (int c = 0; c < count; ++c) {
      const Cell& here = cells[static_cast<size_t>(at) * count + c];
      if (here.least == kInf) continue;
      // The forward part of the trip so far, and what that is more than the trip, at least.
      double ahead = std::max(ahead_.share * here.least, ahead_.forth[at]);
      double late = std::max((ahead_.share - 1) * here.most, ahead_.forth[at] - here.most);
      for (int32_t n : beginning_[at]) {
        const Span& span = spans_[n];
        double longest = box.trip[1] * kRounding - ahead_.trips[span.last + 1] - here.least;
        double before = 0, least_owed = kInf;
        int way = !problem_.cuts && here.type[0] == span.type ? 1 : 0;
        double bar = most - rest_[span.last + 1];
        for (size_t now = opened_[n]; now < opened_[n + 1]; ++now) {
          const Choice& choice = open_[now];
          double price = here.price[way] + choice.price;
          if (price >= bar || choice.trip > longest) break;
          double owed = std::max(here.owed, late + choice.sum);
          if (choice.trip <= before && owed >= least_owed) continue;
          if (ahead + choice.sum + choice.alone > step) continue;
          if (std::max(here.least + choice.alone, trip + choice.again) + owed > step) continue;
          before = choice.trip;
          least_owed = owed;
          double least = here.least + choice.trip;
          int to = std::min(static_cast<int>(least / width), box.cells - 1) * kOwed +
                   std::min(static_cast<int>(owed / owe * kOwed), kOwed - 1);
          cells[static_cast<size_t>(span.last + 1) * count + to].Offer(
              price, least, here.most + choice.trip, owed, span.type,
              {n, choice.units, static_cast<int16_t>(c), static_cast<int16_t>(way)});
        }
      }
    }
  }
  const Cell* last = &cells[static_cast<size_t>(layers) * count];
  int best = 0;
  double price = kInf;
  for (int c = 0; c < count; ++c) {
    bool reaches = last[c].most * kRounding >= box.trip[0];
    if (reaches && last[c].price[0] < price) best = c, price = last[c].price[0];
  }
  if (left) KeepWays(cells, count, left);
  if (ways) {
    ways->Reset(layers, box.cells, kOwed, box.trip[1], owe);
    for (int at = 0; at <= layers; ++at) {
      for (int c = 0; c < count; ++c) {
        const Cell& here = cells[static_cast<size_t>(at) * count + c];
        for (int n : {0, 1}) {
          if (here.price[n] < kInf)
            ways->Offer(at, here.least, here.owed, here.price[n], here.type[n]);
        }
      }
    }
    ways->Finish();
  }
  *chain = {};
  for (int at = layers, c = best, way = 0; price < kInf && at > 0;) {
    const From& from = cells[static_cast<size_t>(at) * count + c].from[way];
    chain->spans.insert(chain->spans.begin(), from.span);
    chain->units.insert(chain->units.begin(), from.units);
    at = spans_[from.span].first, c = from.cell, way = from.way;
  }
  return price;
}

// Keeps the cheapest ways to each boundary by trip.
void StepRelaxation::KeepWays(const std::vector<Cell>& cells, int count, Left* left) const {
  std::vector<int> order;
  for (int at = 0; at <= problem_.layers; ++at) {
    left->begin.push_back(left->ways.size());
    const Cell* here = &cells[static_cast<size_t>(at) * count];
    order.clear();
    for (int c = 0; c < count; ++c) {
      if (here[c].least < kInf) order.push_back(c);
    }
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return here[a].least < here[b].least; });
    Ways best;
    for (int c : order) {
      for (int n : {0, 1}) {
        if (here[c].price[n] < kInf) best.Offer(here[c].price[n], here[c].type[n], -1);
      }
      left->ways.push_back({here[c].least, {best.cost[0], best.cost[1]}, best.type[0]});
    }
  }
  left->begin.push_back(left->ways.size());
}

double StepRelaxation::Trip(int32_t span, int units) const {
  Choice made = ChoiceOf(spans_[span], units);
  double trip = made.trip;
  for (size_t n = begin_[span]; n < begin_[span + 1]; ++n) {
    if (choices_[n].units == units) return made.trip;
    if (!made.Eases(choices_[n])) trip = std::min(trip, choices_[n].trip);
  }
  return trip;
}

double StepRelaxation::Bound(const Rest& rest, double enough) const {
  if (!bounded_) return 0;
  double bound = kInf;
  for (const Left& left : left_) {
    double value = left.box.value;
    if (!left.ways.empty()) {
      double step = left.box.step[1] * kRounding;
      double most = std::min({step - rest.time.pipeline,
                              ahead_.share > 0 ? (step - rest.time.step) / ahead_.share : kInf,
                              left.box.trip[1] * kRounding - rest.trip});
      auto from = left.ways.begin() + left.begin[rest.at];
      auto to = left.ways.begin() + left.begin[rest.at + 1];
      auto way = std::upper_bound(from, to, most * kRounding,
                                  [](double trip, const Way& way) { return trip < way.trip; });
      if (way == from) continue;
      --way;
      double price = rest.price + left.price;
      for (int type = 0; type < problem_.types; ++type) {
        price += left.box.weight[type] * rest.used[type];
      }
      price += way->price[!problem_.cuts && way->type == rest.type ? 1 : 0];
      value = std::max(value, left.box.step[0] / problem_.batch * price / kRounding);
    }
    bound = std::min(bound, value);
    if (bound <= enough) break;
  }
  return bound;
}

// Dollars an hour of the parameter server, less what the limits allow at a box's weights; infinite
// where those leave nothing.
double StepRelaxation::Outside(const Box& box) const {
  double ps = problem_.PsUnits(problem_.batch / box.step[1] / kRounding);
  double price = ps * problem_.price[problem_.ps_type];
  for (int type = 0; type < problem_.types; ++type) {
    double room = problem_.limit[type] - (type == problem_.ps_type ? ps : 0);
    if (room < 0) return kInf;
    price -= box.weight[type] * room;
  }
  return price;
}

double StepRelaxation::Bound(const double* incumbent,
                             const std::function<void(const Chain&)>& offer,
                             const std::function<bool()>& done) {
  double cheapest = *std::min_element(problem_.price.begin(), problem_.price.end());
  double least = ahead_.trips[0], most = slack_ * problem_.batch;
  if (cheapest > 0) most = std::min(most, *incumbent / cheapest * problem_.batch);
  if (choices_.size() > kMostChoices || !(least > 0) || !(most < kInf)) return 0;
  auto evaluate = [&](Box box) { return Look(std::move(box), incumbent, offer); };
  Box all{0, {least, most * kRounding}, {least, most * kRounding}, kCells, {}, false};
  all.weight.assign(problem_.types, 0);
  evaluate(all);
  for (int turn = 0; turn < kTurns && !boxes_.empty() && !done(); ++turn) {
    all = boxes_.top();
    boxes_.pop();
    if (!evaluate(all)) break;
  }
  while (!boxes_.empty()) {
    Box box = boxes_.top();
    if (box.value >= *incumbent) break;
    double tall = std::log(box.step[1] / box.step[0]);
    double wide = (box.trip[1] - box.trip[0]) / box.step[1];
    if (done() || (tall < kFine && box.labelled)) break;
    boxes_.pop();
    if (!box.labelled && tall < kTall && wide < kWide) {
      LookCloser(std::move(box), incumbent, offer, done);
      continue;
    }
    box.labelled = false;
    Box one = box, other = box;
    if (tall >= wide || wide < kWide) {
      one.step[1] = other.step[0] = std::sqrt(box.step[0] * box.step[1]);
      one.trip[1] = std::min(one.trip[1], one.step[1]);
    } else {
      one.trip[1] = other.trip[0] = (box.trip[0] + box.trip[1]) / 2;
      other.step[0] = std::max(other.step[0], other.trip[0]);
    }
    evaluate(one);
    evaluate(other);
  }
  bounded_ = true;
  return boxes_.empty() ? *incumbent : std::min(*incumbent, boxes_.top().value / kRounding);
}

// Bounds a box by its cheapest chain, and leaves it open with what that says; whether its weights
// have moved.
bool StepRelaxation::Look(Box box, const double* incumbent,
                          const std::function<void(const Chain&)>& offer) {
  if (box.step[0] > box.step[1] || box.trip[0] > box.trip[1]) return false;
  double limit = MostPrice(box, *incumbent), outside = Outside(box);
  if (outside == kInf) return false;
  Chain chain;
  double price = Price(box, limit - outside, &chain);
  if (price == kInf) return false;
  price += outside;
  box.value = std::max(box.value, box.step[0] / problem_.batch * price);
  bool moved = Reweigh(chain, price, limit, &box);
  boxes_.push(std::move(box));
  offer(chain);
  return moved;
}

// Bounds a box by its labels, and leaves it open where that is not enough.
void StepRelaxation::LookCloser(Box box, const double* incumbent,
                                const std::function<void(const Chain&)>& offer,
                                const std::function<bool()>& done) {
  double limit = MostPrice(box, *incumbent), outside = Outside(box);
  if (outside == kInf) return;
  Chain chain;
  TripWays ways;
  box.cells = kMostCells;
  double price = Price(box, limit - outside, &chain, nullptr, &ways);
  if (price == kInf) return;
  box.value = std::max(box.value, box.step[0] / problem_.batch * (price + outside));
  if (box.value >= *incumbent) return;
  AddEvery();
  Open(box, every_, every_begin_);
  std::vector<double> room(problem_.limit);
  double ps = problem_.PsUnits(problem_.batch / box.step[1] / kRounding);
  room[problem_.ps_type] -= ps;
  double value = labels_.Bound({{box.step[0], box.step[1]},
                                {box.trip[0], box.trip[1]},
                                outside,
                                limit - outside,
                                ps * problem_.price[problem_.ps_type],
                                box.weight.data(),
                                room.data()},
                               *incumbent * problem_.batch, open_, opened_, ways, &chain, done);
  box.value = std::max(box.value, value / problem_.batch);
  box.labelled = true;
  box.cells = kCells;
  if (box.value >= *incumbent) return;
  if (value > 0) Reweigh(chain, box.value * problem_.batch / box.step[0], limit, &box);
  boxes_.push(std::move(box));
  if (!chain.spans.empty()) offer(chain);
}

// Moves the weights of a box by what its cheapest chain is over the limits; whether it did.
bool StepRelaxation::Reweigh(const Chain& chain, double price, double limit, Box* box) const {
  std::vector<double> over(problem_.types);
  for (int type = 0; type < problem_.types; ++type) over[type] = -problem_.limit[type];
  over[problem_.ps_type] += problem_.PsUnits(problem_.batch / box->step[1] / kRounding);
  for (size_t n = 0; n < chain.spans.size(); ++n) {
    over[spans_[chain.spans[n]].type] += chain.units[n];
  }
  double square = 0, aim = limit < kInf ? limit : kBeyond * price;
  for (int type = 0; type < problem_.types; ++type) {
    if (over[type] < 0 && box->weight[type] <= 0) over[type] = 0;
    square += over[type] * over[type];
  }
  bool moved = square > 0 && aim > price;
  for (int type = 0; moved && type < problem_.types; ++type) {
    double& weight = box->weight[type];
    weight = std::max(0.0, weight + kStride * (aim - price) / square * over[type]);
  }
  return moved;
}

void StepRelaxation::Keep(double incumbent, const std::function<bool()>& done) {
  for (; !boxes_.empty() && boxes_.top().value < incumbent; boxes_.pop()) {
    left_.push_back({boxes_.top(), 0, {}, {}});
    Left& left = left_.back();
    if (left_.size() > kTables || done()) continue;
    left.price = Outside(left.box);
    Chain chain;
    Price(left.box, MostPrice(left.box, incumbent) - left.price, &chain, &left);
  }
}

// What a plan of a box that is cheaper than the incumbent may cost an hour.
double StepRelaxation::MostPrice(const Box& box, double incumbent) const {
  return std::min(problem_.max_price, incumbent * problem_.batch / box.step[0]) * kRounding;
}

}  // namespace heterps::scheduler
