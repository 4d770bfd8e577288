#include "problem/provision.h"

namespace heterps::scheduler {

bool Split(const Problem& problem, const int32_t* assignment, std::vector<Stage>* stages) {
  stages->clear();
  for (int layer = 0; layer < problem.layers; ++layer) {
    int type = assignment[layer];
    if (type < 0 || type >= problem.types || !problem.allowed[problem.At(layer, type)])
      return false;
    if (stages->empty() || stages->back().type != type) stages->push_back({layer, layer, type, {}});
    Stage& stage = stages->back();
    stage.last = layer;
    problem.Extend(&stage.terms, layer, type);
    if (stage.terms.memory > problem.capacity[type]) return false;
  }
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
    low = std::max(low, stage.terms.Busy(problem.limit[stage.type]));
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
