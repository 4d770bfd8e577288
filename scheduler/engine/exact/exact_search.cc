#include "exact/exact_search.h"

#include "problem/provision.h"

namespace heterps::scheduler {

double PaceSearch::LeastTau() const {
  double tau = 0;
  for (int layer = 0; layer < problem_.layers; ++layer) {
    double least = kInf;
    for (int type = 0; type < problem_.types; ++type) {
      if (!problem_.Usable(layer, type)) continue;
      Terms terms;
      problem_.Extend(&terms, layer, type);
      terms.ts = terms.tp = 0;  // a stage that goes on does not pay it
      least = std::min(least, terms.Least(problem_.limit[type]));
    }
    tau = std::max(tau, least);
  }
  return tau * (1 - 1e-12);
}

double PaceSearch::MostTau() const {
  double tau = 0;
  for (int layer = 0; layer < problem_.layers; ++layer) {
    double most = 0;
    for (int type = 0; type < problem_.types; ++type) {
      if (!problem_.Usable(layer, type)) continue;
      Terms terms;
      problem_.Extend(&terms, layer, type);
      most = std::max(most,
                      terms.cs + terms.cp + terms.ds + terms.dp + terms.ts + terms.tp + terms.far);
    }
    tau += most;
  }
  return tau * (1 + 1e-12);
}

double PaceSearch::LeastTau(double units) const {
  if (problem_.ps_core_s <= 0) return 0;
  if (units <= 0) return kInf;
  auto enough = [&](double tau) { return problem_.PsUnits(problem_.Rate(tau, floor_)) <= units; };
  double tau = problem_.ps_core_s / units;
  // Slightly slower than the floor still needs what the floor does.
  if (floor_ > 0 && !enough(tau * (1 + 1e-15)) && enough(1 / (floor_ * (1 - 2 * kTolerance)))) {
    tau = 1 / (floor_ * (1 - kTolerance));
  }
  while (!enough(tau)) tau = std::nextafter(tau, kInf);
  for (double less; enough(less = std::nextafter(tau, 0)); tau = less) {
  }
  return tau;
}

void PaceSearch::Try(const std::vector<int32_t>& assignment, double tau, double slack) {
  std::vector<Stage> stages;
  if (!Split(problem_, assignment.data(), &stages)) return;
  auto cheaper = [&](double value, double reached) {
    if (!(value < found_->value)) return;
    found_->value = value;
    found_->tau = reached;
    found_->assignment = assignment;
  };
  Point point = heterps::scheduler::At(problem_, stages, tau, floor_);
  if (floor_ <= 0 || point.tau * floor_ * (1 - kTolerance) <= 1) {
    cheaper(point.price / problem_.Rate(point.tau, floor_), point.tau);
  }
  if (point.tau < found_->fastest_tau) {
    point = heterps::scheduler::At(problem_, stages, tau, 0);
    if (point.price < kInf) {
      found_->fastest = assignment;
      found_->fastest_tau = point.tau;
    }
  }
  std::string key(reinterpret_cast<const char*>(assignment.data()),
                  assignment.size() * sizeof(int32_t));
  if (slack > 0 && !tried_.insert(std::move(key)).second) return;
  Provisioned best = Provision(problem_, stages, floor_, found_->value, slack);
  cheaper(best.value, best.tau);
}

Answer PaceSearch::At(const Target& target, double most, Effort effort,
                      Clock::time_point deadline) {
  ++found_->paces;
  Answer answer;
  Path path = Shortest(problem_, target);
  answer.bound = path.price;
  answer.exact = true;
  if (path.price == kInf) return answer;
  Try(path.assignment, target.tau);
  if (path.price > most) return answer;
  if (Fits(problem_, target, path.assignment)) {
    answer.price = path.price;
    answer.assignment = std::move(path.assignment);
    return answer;
  }
  // Without a cap on the price the load on the limits leads to a plan within them sooner.
  bool load = effort.any && most == kInf;
  std::vector<double> price = problem_.price;
  for (int type = 0; load && type < problem_.types; ++type) {
    price[type] = 1 / std::max(1.0, target.room[type]);
  }
  SharedLimits shared(problem_, target, price, load ? problem_.types * (1 + kTolerance) : most);
  std::vector<double>* multipliers = load ? &load_multipliers_ : &multipliers_;
  Answer better = shared.Solve(multipliers, effort, deadline,
                               [&](const std::vector<int32_t>& met) { Try(met, target.tau); });
  if (load) return better;
  better.bound = std::max(better.bound, path.price);
  return better;
}

}  // namespace heterps::scheduler
