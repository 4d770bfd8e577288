#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "simulation/run.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

void Check(const std::vector<RunStage>& stages, const Serving& serving, const RunRules& rules) {
  if (stages.empty()) throw std::invalid_argument("expected a stage");
  if (rules.micro_batches < 1 || rules.steps < 1 || rules.staleness < 0 || rules.cut_every < 1) {
    throw std::invalid_argument("expected micro-batches and steps");
  }
  for (const RunStage& stage : stages) {
    size_t slow = stage.slowness.size();
    if (stage.times.units < 1 || stage.per_host < 1) {
      throw std::invalid_argument("expected units of at least 1");
    }
    if (slow && slow != static_cast<size_t>(stage.times.units)) {
      throw std::invalid_argument("expected a slowness of each unit");
    }
  }
  size_t slow = serving.slowness.size();
  if (serving.shards < 0 || (slow && slow != static_cast<size_t>(serving.shards))) {
    throw std::invalid_argument("expected a slowness of each shard");
  }
}

RunResult SimulateReleased(const std::vector<RunStage>& stages, const Serving& serving,
                           const RunRules& rules) {
  Check(stages, serving, rules);
  nb::gil_scoped_release release;
  std::vector<RunStage> ends = stages;
  ends.back().times.way = 0;
  return SimulateRun(ends, serving, rules);
}

}  // namespace

void BindSimulation(nb::module_& m) {
  nb::class_<RunStage>(m, "RunStage", "A stage of a simulated run; see simulation/run.h.")
      .def(
          "__init__",
          [](RunStage* self, int units, double forward, double backward, double cross, double sync,
             double way, std::vector<double> slowness, double host_link, int per_host) {
            new (self) RunStage{
                {units, forward, backward, cross, sync, way}, slowness, host_link, per_host};
          },
          "units"_a, "forward"_a, "backward"_a, "cross"_a = 0.0, "sync"_a = 0.0, "way"_a = 0.0,
          "slowness"_a = std::vector<double>(), "host_link"_a = 0.0, "per_host"_a = 1);
  nb::class_<Serving>(m, "Serving", "Shards of a simulated run; see simulation/run.h.")
      .def(nb::init<>())
      .def_rw("shards", &Serving::shards)
      .def_rw("priced", &Serving::priced)
      .def_rw("way", &Serving::way)
      .def_rw("client_message", &Serving::client_message)
      .def_rw("client_pull", &Serving::client_pull)
      .def_rw("client_push", &Serving::client_push)
      .def_rw("message", &Serving::message)
      .def_rw("pull", &Serving::pull)
      .def_rw("push", &Serving::push)
      .def_rw("commit", &Serving::commit)
      .def_rw("pull_link", &Serving::pull_link)
      .def_rw("push_link", &Serving::push_link)
      .def_rw("shard_pull_link", &Serving::shard_pull_link)
      .def_rw("shard_push_link", &Serving::shard_push_link)
      .def_rw("slowness", &Serving::slowness);
  nb::class_<Kills>(m, "Kills", "Units that are taken away; see simulation/run.h.")
      .def(
          "__init__",
          [](Kills* self, double per_s, double lost_s, bool back) {
            new (self) Kills{per_s, lost_s, back};
          },
          "per_s"_a, "lost_s"_a, "back"_a = false);
  nb::class_<RunRules>(m, "RunRules", "What holds for all stages; see simulation/run.h.")
      .def(
          "__init__",
          [](RunRules* self, int micro_batches, int staleness, int steps, bool whole_batch) {
            new (self) RunRules{.micro_batches = micro_batches,
                                .staleness = staleness,
                                .steps = steps,
                                .whole_batch = whole_batch};
          },
          "micro_batches"_a, "staleness"_a, "steps"_a, "whole_batch"_a = false)
      .def_rw("end", &RunRules::end)
      .def_rw("part", &RunRules::part)
      .def_rw("closing", &RunRules::closing)
      .def_rw("tell", &RunRules::tell)
      .def_rw("tell_rows", &RunRules::tell_rows)
      .def_rw("cores", &RunRules::cores)
      .def_rw("noise", &RunRules::noise)
      .def_rw("seed", &RunRules::seed)
      .def_rw("kills", &RunRules::kills)
      .def_rw("cut_every", &RunRules::cut_every);
  nb::class_<RunResult>(m, "RunResult", "What a simulated run came to; see simulation/run.h.")
      .def_ro("updated", &RunResult::updated)
      .def_prop_ro("spent",
                   [](const RunResult& result) {
                     std::vector<std::vector<double>> spent;
                     for (const auto& each : result.spent)
                       spent.emplace_back(each.begin(), each.end());
                     return spent;
                   })
      .def_ro("kills", &RunResult::kills)
      .def_ro("redone", &RunResult::redone)
      .def_ro("backwards", &RunResult::backwards)
      .def_ro("serving", &RunResult::serving);
  m.def("simulate_run", &SimulateReleased, "stages"_a, "serving"_a, "rules"_a,
        "Simulate a training of so many steps on machines that have limits.");
}

}  // namespace heterps::scheduler
