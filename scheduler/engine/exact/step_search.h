// The cheapest plan where what counts is the simulated time of a step, not the slowest stage alone.
//
// Stages are put before each other from the last layer to the first, with every number of units: a
// label is a way to cover the layers from some layer on, with what `StepBound` says of its time.
// The label of the least bound is lengthened first; one that covers all layers is simulated. What
// the layers before may cost at some pace is known from the chain's dynamic program.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/steps.h"

namespace heterps::scheduler {

// How hard to look: labels made, at most, and seconds; with `all` none is dropped for one that
// looks better in everything, which the simulation need not confirm.
struct StepEffort {
  size_t labels;
  bool all;
  double seconds;
  int plans = 1 << 30;  // simulated, of those found in the order of their bounds
};

struct StepFound {
  std::vector<int32_t> assignment;  // empty where no plan was found
  std::vector<int32_t> units;       // of its stages
  double value = kInf;              // seconds a sample * price an hour
  double tau = kInf;                // seconds a sample
  double slowest = kInf;            // ET of its slowest stage, s a sample
  double bound = 0;                 // no plan has a smaller value
};

// The cheapest plan that reaches `floor`, samples/s. Looks for less than `incumbent` only.
//
// Where `fixed` is given, of these stages alone. With `fastest` the value is the seconds a sample.
StepFound SolveSteps(const Problem& problem, double floor, StepEffort effort,
                     const std::vector<std::vector<int32_t>>& starts = {},
                     const std::vector<Stage>* fixed = nullptr, double incumbent = kInf,
                     bool fastest = false);

}  // namespace heterps::scheduler
