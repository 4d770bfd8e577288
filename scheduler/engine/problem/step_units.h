// Numbers of units for given stages by simulated, flushed steps, found quickly: for searches that
// look at many assignments. A good choice, not always the cheapest.
#pragma once

#include <vector>

#include "problem/provision.h"
#include "problem/steps.h"

namespace heterps::scheduler {

class StepUnits {
 public:
  // `floor` is the throughput to reach, samples/s.
  StepUnits(const Problem& problem, double floor);

  // Seconds a sample * price an hour of an assignment; infinite where memory does not hold it.
  // Where floor, shared limits or cap are missed it is more, by how much they are, and `fits` is
  // false. What is above `most` is not simulated: the result is then at least `most`.
  double Price(const std::vector<int32_t>& assignment, double most, bool* fits);

  // The units of each stage that the last price is for, where it was simulated; else none.
  const std::vector<double>& units() const { return units_; }

 private:
  // A number of units of a stage: more than of the option before it, and less waiting for it.
  struct Option {
    StepStage stage;
    double wait;     // seconds of a step beyond a micro-batch's way through all stages
    double rounds;   // micro-batches of a worker
    double slowest;  // ET, s a sample
  };
  struct Choice {
    double value = kInf;  // by what no step takes less than
    std::vector<int> at;  // the option of each stage
  };

  bool List();
  bool Holds(const std::vector<int>& at) const;
  double Value(const std::vector<int>& at, bool simulated, bool* fits);
  void Improve(Choice now);

  const Problem& problem_;
  double floor_, slowest_;  // seconds a sample
  std::vector<Stage> stages_;
  std::vector<std::vector<Option>> options_;
  bool crowded_ = false;  // what is in flight may exceed the memory of some stage
  double least_ = 0;      // seconds a sample that no choice takes less than
  std::vector<Choice> choices_;
  std::vector<StepStage> made_;
  std::vector<double> units_;
};

}  // namespace heterps::scheduler
