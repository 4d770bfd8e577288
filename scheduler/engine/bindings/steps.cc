#include "problem/steps.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "exact/step_search.h"
#include "problem/step_returns.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

using Stages = std::vector<std::tuple<int, double, double, double, double>>;

using Delays = std::vector<double>;

std::vector<StepStage> Made(const Stages& given, int micro_batches, double way,
                            const Delays& delays) {
  std::vector<StepStage> stages;
  if (micro_batches < 1) throw std::invalid_argument("expected micro_batches of at least 1");
  for (auto [units, forward, backward, cross, sync] : given) {
    if (units < 1) throw std::invalid_argument("expected units of at least 1");
    stages.push_back({units, forward, backward, cross, sync, way});
  }
  if (stages.empty()) throw std::invalid_argument("expected a stage");
  stages.back().way = 0;
  if (!delays.empty() && delays.size() != stages.size()) {
    throw std::invalid_argument("expected a delay for each stage");
  }
  for (size_t s = 0; s < delays.size(); ++s) stages[s].delay = delays[s];
  return stages;
}

StepFound SolveReleased(const Problem& problem, double floor,
                        const std::vector<std::vector<int32_t>>& starts, size_t labels, bool all,
                        double seconds, bool fixed, double incumbent, bool fastest) {
  for (const std::vector<int32_t>& start : starts) {
    if (start.size() != static_cast<size_t>(problem.layers)) {
      throw std::invalid_argument("expected starts of one type a layer");
    }
  }
  if (!problem.micro_batches) throw std::invalid_argument("expected a problem with micro-batches");
  nb::gil_scoped_release release;
  std::vector<Stage> stages;
  if (fixed && (starts.size() != 1 || !Split(problem, starts[0].data(), &stages))) {
    StepFound nothing;
    nothing.bound = kInf;
    return nothing;
  }
  return SolveSteps(problem, floor, {labels, all, seconds}, starts, fixed ? &stages : nullptr,
                    incumbent, fastest);
}

}  // namespace

void BindSteps(nb::module_& m) {
  m.def(
      "simulate",
      [](const Stages& stages, int micro_batches, int staleness, int steps, double way,
         bool whole_batch, const Delays& delays) {
        if (staleness < 0 || steps < 1) throw std::invalid_argument("expected steps");
        std::vector<StepStage> made = Made(stages, micro_batches, way, delays);
        nb::gil_scoped_release release;
        return Simulate(made, micro_batches, staleness, steps, whole_batch);
      },
      "stages"_a, "micro_batches"_a, "staleness"_a, "steps"_a, "way"_a = 0.0,
      "whole_batch"_a = false, "delays"_a = Delays(),
      "Seconds between the updates of steps on end; a stage is (units, forward s, backward s, "
      "crossing s a micro-batch, sync s a step); `way` is what a micro-batch takes to another "
      "stage "
      "and back besides; of a loss of whole batches where `whole_batch`; `delays` pass in each "
      "stage after its sum, while nothing is busy.");
  m.def(
      "step_seconds",
      [](const Stages& stages, int micro_batches, int staleness, double slowest, double way,
         bool whole_batch, const Delays& delays) {
        if (staleness < 0) throw std::invalid_argument("expected staleness of at least 0");
        std::vector<StepStage> made = Made(stages, micro_batches, way, delays);
        nb::gil_scoped_release release;
        return StepSeconds(made, micro_batches, staleness, slowest, whole_batch);
      },
      "stages"_a, "micro_batches"_a, "staleness"_a, "slowest"_a, "way"_a = 0.0,
      "whole_batch"_a = false, "delays"_a = Delays(),
      "Seconds a step once the pipeline is as full as it gets, at least `slowest`.");
  nb::class_<StepFound>(m, "StepFound", "A plan by simulated steps; see exact/step_search.h.")
      .def_ro("assignment", &StepFound::assignment)
      .def_ro("units", &StepFound::units)
      .def_ro("value", &StepFound::value)
      .def_ro("tau", &StepFound::tau)
      .def_ro("bound", &StepFound::bound);
  m.def("solve_steps", &SolveReleased, "problem"_a, "floor"_a, "starts"_a, "labels"_a, "all"_a,
        "seconds"_a, "fixed"_a = false, "incumbent"_a = kInf, "fastest"_a = false,
        "Find the least seconds a sample * price an hour by simulated steps; with `fixed` of the "
        "one start alone, with `fastest` the least seconds a sample.");
  m.def(
      "step_bound",
      [](const Stages& stages, int micro_batches, double way, const Delays& delays) {
        std::vector<StepStage> made = Made(stages, micro_batches, way, delays);
        return LeastSeconds(made, micro_batches);
      },
      "stages"_a, "micro_batches"_a, "way"_a = 0.0, "delays"_a = Delays(),
      "Seconds that no flushed step takes less than.");
}

}  // namespace heterps::scheduler
