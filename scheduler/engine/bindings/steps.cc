#include "problem/steps.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

using Stages = std::vector<std::tuple<int, double, double, double, double>>;

std::vector<StepStage> Made(const Stages& given, int micro_batches) {
  std::vector<StepStage> stages;
  if (micro_batches < 1) throw std::invalid_argument("expected micro_batches of at least 1");
  for (auto [units, forward, backward, cross, sync] : given) {
    if (units < 1) throw std::invalid_argument("expected units of at least 1");
    stages.push_back({units, forward, backward, cross, sync});
  }
  if (stages.empty()) throw std::invalid_argument("expected a stage");
  return stages;
}

}  // namespace

void BindSteps(nb::module_& m) {
  m.def(
      "simulate",
      [](const Stages& stages, int micro_batches, int staleness, int steps) {
        if (staleness < 0 || steps < 1) throw std::invalid_argument("expected steps");
        std::vector<StepStage> made = Made(stages, micro_batches);
        nb::gil_scoped_release release;
        return Simulate(made, micro_batches, staleness, steps);
      },
      "stages"_a, "micro_batches"_a, "staleness"_a, "steps"_a,
      "Seconds between the updates of steps on end; a stage is (units, forward s, backward s, "
      "crossing s a micro-batch, sync s a step).");
  m.def(
      "step_bound",
      [](const Stages& stages, int micro_batches) {
        std::vector<StepStage> made = Made(stages, micro_batches);
        StepBound bound;
        for (size_t s = made.size(); s-- > 0;) bound = bound.Before(made[s], micro_batches);
        return bound.step;
      },
      "stages"_a, "micro_batches"_a, "Seconds that no flushed step takes less than.");
}

}  // namespace heterps::scheduler
