#include "problem/provision.h"

namespace heterps::scheduler {

namespace {

// Makes one of neighbours on one type that fit together.
void Join(const Problem& problem, std::vector<Stage>* stages) {
  std::vector<Stage> joined;
  for (const Stage& stage : *stages) {
    if (joined.empty() || joined.back().type != stage.type ||
        problem.Apart(joined.back().terms, stage.terms, stage.type)) {
      joined.push_back(stage);
      continue;
    }
    Stage& last = joined.back();
    last.last = stage.last;
    for (int layer = stage.first; layer <= stage.last; ++layer) {
      problem.Extend(&last.terms, layer, stage.type);
    }
  }
  *stages = std::move(joined);
}

}  // namespace

bool Split(const Problem& problem, const int32_t* assignment, std::vector<Stage>* stages) {
  stages->clear();
  int types = problem.types, codes = problem.cuts ? 2 * types : types;
  bool again = false;  // some neighbours are on one type
  int before = -1;
  for (int first = 0; first < problem.layers;) {
    int code = assignment[first], last = first;
    if (code < 0 || code >= codes) return false;
    int type = code % types;
    while (!problem.Ends(last)) ++last;
    Terms more = stages->empty() ? Terms() : stages->back().terms;
    bool begins = code != before;
    if (begins) more = Terms();
    auto extend = [&] {
      for (int layer = first; layer <= last; ++layer) {
        if (!problem.allowed[problem.At(layer, type)]) return false;
        problem.Extend(&more, layer, type);
      }
      return true;
    };
    if (!extend()) return false;
    if (more.memory > problem.capacity[type]) {
      if (begins || !problem.cuts) return false;
      begins = true;
      more = Terms();
      extend();
      if (more.memory > problem.capacity[type]) return false;
    }
    if (begins) {
      again |= !stages->empty() && stages->back().type == type && code != before;
      stages->push_back({first, last, type, {}});
    }
    stages->back().last = last;
    stages->back().terms = more;
    before = code;
    first = last + 1;
  }
  if (again) Join(problem, stages);
  return true;
}

Point At(const Problem& problem, const std::vector<Stage>& stages, double tau, double floor) {
  Point point;
  double price = 0, busy = 0;
  double used[kMaxTypes] = {};
  for (const Stage& stage : stages) {
    double units = stage.terms.Units(tau);
    if (!(units <= problem.limit[stage.type])) return point;
    used[stage.type] += units;
    price += units * problem.price[stage.type];
    busy = std::max(busy, stage.terms.Busy(units));
  }
  double ps_price = problem.price[problem.ps_type];
  point.least = price + problem.PsUnits(problem.Rate(tau, floor)) * ps_price;
  point.tau = busy;
  double ps = problem.PsUnits(problem.Rate(busy, floor));
  used[problem.ps_type] += ps;
  price += ps * ps_price;
  bool fits = price <= problem.max_price * (1 + kTolerance);
  for (int type = 0; type < problem.types; ++type) fits &= used[type] <= problem.limit[type];
  if (fits) point.price = price;
  return point;
}

Provisioned Provision(const Problem& problem, const std::vector<Stage>& stages, double floor,
                      double incumbent, double slack) {
  Provisioned best;
  double low = 0, high = 0;
  for (const Stage& stage : stages) {
    low = std::max(low, stage.terms.Least(std::min(problem.limit[stage.type], stage.terms.most)));
    high = std::max(high, stage.terms.Busy(1));
  }
  if (floor > 0) high = std::min(high, 1 / (floor * (1 - kTolerance)));
  double bar = incumbent;
  double tau = high;
  while (tau >= low && tau > 0) {
    Point point = At(problem, stages, tau, floor);
    if (point.least == kInf) break;
    double value = point.price / problem.Rate(point.tau, floor);
    if (value < bar) {
      best = {value, point.tau};
      bar = value;
    }
    tau = std::min(point.tau, bar * (1 - slack) / point.least);
    tau = std::nextafter(tau, 0);
  }
  return best;
}

}  // namespace heterps::scheduler
