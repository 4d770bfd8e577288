// Provisioning: the cheapest whole numbers of units for a fixed assignment.
#pragma once

#include <vector>

#include "problem/problem.h"

namespace heterps::scheduler {

struct Stage {
  int first = 0, last = 0, type = 0;
  Terms terms;
};

struct Provisioned {
  double value = kInf;  // tau * price: dollars a sample times 3600; infinite where nothing is met
  double tau = kInf;    // ET of the slowest stage, s a sample
};

// Splits an assignment (type of each layer) into its stages; false where one cannot run.
//
// Where the problem has cuts, a stage ends besides before the layer that would not fit in its
// type's memory; and where the type's code changes: `types` + type stands for the same type, so
// that stages side by side may be on one. Those that fit together are one stage all the same.
// Layers that are joined are all on the type of the first of them.
bool Split(const Problem& problem, const int32_t* assignment, std::vector<Stage>* stages);

// The fewest units that keep one pace, and what they come to.
struct Point {
  double least = kInf;  // price an hour, limits shared by stages and the cap ignored; never falls
                        // as tau does; infinite beyond the limit of a single stage
  double price = kInf;  // price an hour; infinite beyond limits or the cap
  double tau = kInf;    // ET reached, at most the tau asked for
};
Point At(const Problem& problem, const std::vector<Stage>& stages, double tau, double floor);

// The least value over all tau with a throughput of at least `floor`.
//
// Looks for less than `incumbent` * (1 - slack) only. Exact where slack is 0: having seen the
// least price P of all tau below some ET, no tau above best / P can be better, and is skipped.
Provisioned Provision(const Problem& problem, const std::vector<Stage>& stages, double floor,
                      double incumbent = kInf, double slack = 0);

}  // namespace heterps::scheduler
