// Flushed plans near a given one: the layers of a window go to one type, and the units are chosen
// anew (`StepUnits`), as long as that is cheaper.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "problem/step_units.h"

namespace heterps::scheduler {

class StepDescent {
 public:
  using Offer = std::function<void(const std::vector<int32_t>&, const std::vector<double>& units)>;

  // `floor` is the throughput to reach, samples/s.
  StepDescent(const Problem& problem, double floor);

  // Tries `windows` windows, one after the other, from a plan that may miss floor, limits and cap.
  // A plan that is a little dearer is gone on from, too, at first (simulated annealing). Each plan
  // that meets all demands and is cheaper than those before goes to `offer`.
  void Run(std::vector<int32_t> assignment, int windows, const Offer& offer,
           const std::function<bool()>& done);

 private:
  // Lays a window of `now` about the layer `from` on one type; whether that is something else and
  // may run.
  bool Move(std::vector<int32_t>* now, int from);
  double Random();
  int Below(int count) { return static_cast<int>(Random() * count); }

  const Problem& problem_;
  StepUnits units_;
  uint64_t random_ = 1;
  int near_ = 0;  // a layer beside the last window
};

}  // namespace heterps::scheduler
