// The exact solver: the cheapest plan over all assignments and paces, or a bound below all.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/problem.h"
#include "problem/provision.h"

namespace heterps::scheduler {

struct Found {
  std::vector<int32_t> assignment;  // empty where no plan was found
  double value = kInf;              // tau * price an hour
  double tau = kInf;                // ET of its slowest stage
  // No plan has a smaller value; infinite where there is no plan.
  double bound = 0;
  // Where that bound is lowest: the ET that a search from elsewhere should look at; 0 if settled.
  double hard_tau = 0;
  std::vector<int32_t> fastest;  // the assignment that reaches the highest throughput found
  double fastest_tau = kInf;
  int64_t paces = 0;  // at which the problem was solved
};

// A lower bound from elsewhere: no plan with an ET of at most `tau` has a lower price an hour.
struct Known {
  double tau, least;
};

// Searches for at most about `seconds`. `starts` are assignments to begin with.
Found Solve(const Problem& problem, double floor, const std::vector<std::vector<int32_t>>& starts,
            const std::vector<Known>& known, double seconds);

// The least ET of the slowest stage that units within limits and cap give a fixed assignment, s a
// sample; infinite where there are none.
double FastestTau(const Problem& problem, const std::vector<Stage>& stages);

}  // namespace heterps::scheduler
