// What the searches for the cheapest and for the fastest plan share: one pace at a time.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "exact/exact.h"
#include "exact/labels.h"
#include "problem/chain.h"
#include "problem/problem.h"

namespace heterps::scheduler {

class PaceSearch {
 public:
  // Keeps references; what is found goes to `found`.
  PaceSearch(const Problem& problem, double floor, Found* found)
      : problem_(problem),
        floor_(floor),
        found_(found),
        multipliers_(problem.types, 0.0),
        load_multipliers_(problem.types, 0.0) {}

  // Bounds of the ET of any plan's slowest stage.
  double LeastTau() const;
  double MostTau() const;
  // Least tau at which the parameter server needs no more than `units`.
  double LeastTau(double units) const;

  // The plans whose stages take at most `target.tau`, of a price an hour of at most `most`.
  // Every assignment met on the way is tried. Where any plan will do, `most` limits it only if
  // finite, and the bound says nothing of prices.
  Answer At(const Target& target, double most, Effort effort, Clock::time_point deadline);

  // Keeps an assignment where it is the cheapest or the fastest so far: provisioned for `tau`, and
  // once for any pace, where that is better than the best by a share of `slack`.
  void Try(const std::vector<int32_t>& assignment, double tau, double slack = 1e-3);

 private:
  const Problem& problem_;
  double floor_;
  Found* found_;
  std::unordered_set<std::string> tried_;
  std::vector<double> multipliers_, load_multipliers_;  // where the last search ended
};

// The search for the fastest plan: `found->fastest` and its tau.
void FindFastest(const Problem& problem, PaceSearch* search, Found* found,
                 Clock::time_point deadline);

}  // namespace heterps::scheduler
