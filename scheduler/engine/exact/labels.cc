#include "exact/labels.h"

namespace heterps::scheduler {
namespace {

constexpr int kSteps = 120;   // subgradient steps
constexpr int kPatience = 6;  // steps without a better bound after which they shorten
constexpr double kExactly = 1e-12;

}  // namespace

SharedLimits::SharedLimits(const Problem& problem, const Target& target, std::vector<double> price,
                           double most)
    : problem_(problem),
      target_(target),
      price_(std::move(price)),
      most_(most),
      must_hit_(target.hit_from > 0),
      graph_(Arcs(problem, target, price_, most)) {}

std::vector<double> SharedLimits::Weights(const std::vector<double>& multipliers) const {
  std::vector<double> weight(price_);
  for (int type = 0; type < problem_.types; ++type) weight[type] += multipliers[type];
  return weight;
}

double SharedLimits::Constant(const std::vector<double>& multipliers) const {
  double sum = 0;
  for (int type = 0; type < problem_.types; ++type) {
    if (multipliers[type] > 0) sum += multipliers[type] * target_.room[type];
  }
  return sum;
}

SharedLimits::Rest SharedLimits::CostsToGo(const std::vector<double>& weight) const {
  Rest rest{Onward(problem_, 0), must_hit_ ? Onward(problem_, kInf) : Onward()};
  std::vector<Onward::Sized> free_sized, must_sized;
  for (int first = problem_.layers - 1; first >= 0; --first) {
    int32_t end = graph_.begin[first + 1];
    for (int32_t n = graph_.begin[first]; n < end; ++n) {
      const Arc& arc = graph_.arcs[n];
      double own = weight[arc.type] * arc.units, bytes = graph_.Bytes(n);
      double free = own + rest.free.Cost(arc.to, arc.type, bytes);
      if (free < kInf) rest.free.Offer(first, free, arc.type, n);
      double must = free;
      if (must_hit_) {
        if (!arc.hit) must = own + rest.must.Cost(arc.to, arc.type, bytes);
        if (must < kInf) rest.must.Offer(first, must, arc.type, n);
      }
      if (!problem_.cuts) continue;
      free_sized.push_back({bytes, free, n});
      must_sized.push_back({bytes, must, n});
      if (n + 1 < end && graph_.arcs[n + 1].type == arc.type) continue;
      rest.free.Keep(first, arc.type, &free_sized);
      if (must_hit_) rest.must.Keep(first, arc.type, &must_sized);
      must_sized.clear();
    }
  }
  return rest;
}

std::vector<int32_t> SharedLimits::Walk(const Rest& rest, std::vector<double>* used,
                                        double* price) const {
  std::vector<int32_t> assignment(problem_.layers);
  used->assign(problem_.types, 0);
  *price = 0;
  bool hit = !must_hit_;
  double bytes = 0;
  for (int at = 0, type = -1; at < problem_.layers;) {
    int32_t n = rest.At(hit).After(at, type, bytes).via;
    const Arc& arc = graph_.arcs[n];
    type = arc.type;
    bytes = graph_.Bytes(n);
    hit = hit || arc.hit;
    (*used)[type] += arc.units;
    *price += arc.units * price_[type];
    int code = Code(type, at > 0 ? assignment[at - 1] : -1, problem_.types);
    std::fill(assignment.begin() + at, assignment.begin() + arc.to, code);
    at = arc.to;
  }
  return assignment;
}

// One subgradient step towards `target`, each limit measured in its own size.
double SharedLimits::Step(std::vector<double>* multipliers, double current, double target,
                          const std::vector<double>& used) const {
  double norm = 0;
  std::vector<double> over(problem_.types, 0);
  for (int type = 0; type < problem_.types; ++type) {
    if (target_.room[type] < 1) continue;
    over[type] = used[type] / target_.room[type] - 1;
    if (over[type] < 0 && (*multipliers)[type] <= 0) over[type] = 0;
    norm += over[type] * over[type];
  }
  if (norm <= 0) return 0;
  double length = (target - current) / norm;
  for (int type = 0; type < problem_.types; ++type) {
    if (over[type] == 0) continue;
    double scaled = (*multipliers)[type] * target_.room[type] + length * over[type];
    (*multipliers)[type] = std::max(0.0, scaled / target_.room[type]);
  }
  return norm;
}

Answer SharedLimits::Solve(std::vector<double>* multipliers, Effort effort,
                           Clock::time_point deadline, const Visit& visit) {
  Answer answer;
  answer.bound = 0;
  std::vector<double> at = *multipliers, used;
  double ahead = 0;  // how far above the bound the steps aim
  int idle = 0;
  std::vector<int32_t> before;
  for (int step = 0; step < kSteps; ++step) {
    Rest rest = CostsToGo(Weights(at));
    double cost = rest.At(!must_hit_).At(0).cost[0], price;
    if (cost == kInf) {
      answer.bound = most_;
      break;
    }
    double value = cost - Constant(at);
    std::vector<int32_t> path = Walk(rest, &used, &price);
    bool within = true;
    for (int type = 0; type < problem_.types; ++type) within &= used[type] <= target_.room[type];
    // Beyond the limits here it may be within them at a slower pace.
    if ((within || step % 8 == 0) && path != before) visit(path);
    if (within && price <= most_ && price < answer.price) {
      answer.price = price;
      answer.assignment = path;
      if (effort.any) return answer;
    }
    before = std::move(path);
    if (step == 0) ahead = 0.05 * (value > 0 ? value : most_ < kInf ? most_ : 1.0);
    if (value > answer.bound || step == 0) {
      bool much = value > answer.bound + 0.1 * ahead;
      answer.bound = std::max(answer.bound, value);
      *multipliers = at;
      idle = 0;
      if (much) ahead *= 1.5;
    } else if (++idle >= kPatience) {
      ahead *= 0.5;
      idle = 0;
      at = *multipliers;
    }
    if (answer.bound > most_ || answer.bound >= answer.price * (1 - kExactly)) break;
    double target = std::min(answer.bound + ahead, std::min(answer.price, most_ * 1.01));
    if (Step(&at, value, target, used) == 0 || ahead < 1e-7 * answer.bound) break;
    if (Clock::now() > deadline) return answer;
    // Most arcs are in no plan worth having: from here on every step is shorter.
    if (step == 5 || step == 20 || step == 60) Fix(*multipliers);
  }
  answer.bound = std::min(answer.bound, most_);
  answer.exact = answer.bound >= most_ || answer.bound >= answer.price * (1 - kExactly);
  if (answer.exact) return answer;
  Fix(*multipliers);
  const Rests rests = AllCostsToGo(*multipliers);
  Dive(*multipliers, rests, effort, visit, &answer);
  if (effort.any && !answer.assignment.empty()) return answer;
  Search(*multipliers, rests, effort, deadline, visit, &answer);
  return answer;
}

// Drops the arcs that no plan of a price of at most `most` uses.
void SharedLimits::Fix(const std::vector<double>& multipliers) {
  std::vector<double> weight = Weights(multipliers);
  double most = (most_ + Constant(multipliers)) * (1 + 1e-9);
  Rest rest = CostsToGo(weight);
  std::vector<Ways> so_far(problem_.layers + 1);
  so_far[0].cost[0] = 0;
  Graph kept;
  for (int first = 0; first < problem_.layers; ++first) {
    kept.begin.push_back(static_cast<int32_t>(kept.arcs.size()));
    for (int32_t n = graph_.begin[first]; n < graph_.begin[first + 1]; ++n) {
      const Arc& arc = graph_.arcs[n];
      const Ways& from = so_far[first];
      double cost = from.cost[from.After(arc.type, problem_.cuts)] + weight[arc.type] * arc.units;
      double after = rest.free.Cost(arc.to, arc.type, graph_.Bytes(n));
      if (!(cost + after <= most)) continue;
      so_far[arc.to].Offer(cost, arc.type, n);
      kept.arcs.push_back(arc);
      if (problem_.cuts) kept.bytes.push_back(graph_.Bytes(n));
    }
  }
  kept.begin.push_back(static_cast<int32_t>(kept.arcs.size()));
  graph_ = std::move(kept);
}

// The types whose limit some path of the graph exceeds.
std::vector<int> SharedLimits::Tight() const {
  std::vector<int> tight;
  std::vector<double> most(problem_.layers + 1);
  for (int type = 0; type < problem_.types; ++type) {
    std::fill(most.begin(), most.end(), -kInf);
    most[problem_.layers] = 0;
    for (int first = problem_.layers - 1; first >= 0; --first) {
      for (int32_t n = graph_.begin[first]; n < graph_.begin[first + 1]; ++n) {
        const Arc& arc = graph_.arcs[n];
        double own = arc.type == type ? arc.units : 0;
        most[first] = std::max(most[first], own + most[arc.to]);
      }
    }
    if (most[0] > target_.room[type]) tight.push_back(type);
  }
  return tight;
}

SharedLimits::Rests SharedLimits::AllCostsToGo(const std::vector<double>& multipliers) const {
  Rests rests{CostsToGo(Weights(multipliers)), CostsToGo(price_), Tight(), {}};
  for (int type : rests.tight) {
    std::vector<double> one(problem_.types, 0.0);
    one[type] = 1;
    rests.fewest.push_back(CostsToGo(one));
  }
  return rests;
}

}  // namespace heterps::scheduler
