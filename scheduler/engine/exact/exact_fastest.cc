#include "exact/exact_search.h"

namespace heterps::scheduler {
namespace {

constexpr double kClose = 1 - 1e-10, kNear = 0.998;

}  // namespace

double FastestTau(const Problem& problem, const std::vector<Stage>& stages) {
  double low = 0, high = 0;
  for (const Stage& stage : stages) high = std::max(high, stage.terms.Busy(1));
  Point point = At(problem, stages, high, 0);
  if (point.price == kInf) return kInf;
  for (high = point.tau;;) {
    double tau = low + (high - low) / 2;
    if (!(tau > low && tau < high)) return high;
    point = At(problem, stages, tau, 0);
    if (point.price < kInf) {
      high = std::min(tau, point.tau);
    } else {
      low = tau;
    }
  }
}

void FindFastest(const Problem& problem, PaceSearch* search, Found* found,
                 Clock::time_point deadline) {
  double cap = problem.max_price * (1 + kTolerance);
  auto possible = [&](double tau, double ps, double hit_from, Effort effort) {
    Target target(problem, tau, ps, hit_from);
    if (target.room[problem.ps_type] < 0) return false;
    double left = cap - ps * problem.price[problem.ps_type];
    return !search->At(target, left, effort, deadline).assignment.empty();
  };
  // Least tau in (low, high] that is possible, `high` being so.
  auto bisect = [&](double low, double high, auto&& holds) {
    while (low < high * kClose && Clock::now() < deadline) {
      double tau = std::sqrt(low) * std::sqrt(high);
      // ETs are few: once close, no faster plan at all is the likely case.
      if (high == found->fastest_tau && low > high * kNear) tau = high * kClose;
      if (holds(tau, kQuickAny)) {
        // A plan may be faster than asked for.
        high = found->fastest_tau > low ? std::min(tau, found->fastest_tau) : tau;
      } else {
        low = tau;
      }
    }
    return high;
  };

  double low = search->LeastTau(), slow = search->MostTau();
  double high = std::min(slow, found->fastest_tau);
  if (low > high) return;
  // First with the parameter server that a tau needs, though a plan may be faster than that tau.
  auto keeps = [&](double tau, Effort effort) {
    return possible(tau, problem.PsUnits(1 / tau), 0, effort);
  };
  if (found->fastest_tau == kInf && !keeps(high, kAny)) return;
  double least = bisect(low, high, keeps);
  // Where there is no plan for the floor, this is the answer, and deserves certainty.
  while (found->assignment.empty() && Clock::now() < deadline && keeps(least * kClose, kAny)) {
    least = bisect(low, least * kClose, keeps);
  }
  // Then, where such a plan needs more of it, one exactly as slow as each size of it allows.
  while (problem.ps_core_s > 0 && least < found->fastest_tau * kClose && Clock::now() < deadline) {
    double ps = problem.PsUnits(1 / least);
    double from = search->LeastTau(ps);
    double to = std::min(slow, std::nextafter(search->LeastTau(ps - 1), 0));
    auto hits = [&](double tau, Effort effort) { return possible(tau, ps, from, effort); };
    if (hits(to, found->assignment.empty() ? kAny : kQuickAny)) {
      bisect(std::max(from, least) * kClose, std::min(to, found->fastest_tau), hits);
      return;
    }
    least = std::nextafter(to, kInf);
    if (least > slow) return;
  }
}

}  // namespace heterps::scheduler
