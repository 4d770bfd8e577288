#include "exact/exact.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

Found SolveReleased(const Problem& problem, double floor,
                    const std::vector<std::vector<int32_t>>& starts, double seconds,
                    const std::vector<std::pair<double, double>>& known) {
  for (const std::vector<int32_t>& start : starts) {
    if (start.size() != static_cast<size_t>(problem.layers)) {
      throw std::invalid_argument("expected starts of one type a layer");
    }
  }
  std::vector<Known> bounds;
  for (auto [tau, least] : known) bounds.push_back({tau, least});
  nb::gil_scoped_release release;
  return Solve(problem, floor, starts, bounds, seconds);
}

std::vector<Stage> Stages(const Problem& problem, const std::vector<int32_t>& assignment) {
  std::vector<Stage> stages;
  if (assignment.size() != static_cast<size_t>(problem.layers) ||
      !Split(problem, assignment.data(), &stages)) {
    throw std::invalid_argument("expected a type for each layer that may run it");
  }
  return stages;
}

std::vector<int32_t> Cut(Problem problem, const std::vector<int32_t>& assignment, double floor,
                         double seconds) {
  Stages(problem, assignment);
  nb::gil_scoped_release release;
  for (int layer = 0; layer < problem.layers; ++layer) {
    for (int type = 0; type < problem.types; ++type) {
      if (type != assignment[layer] % problem.types) problem.allowed[problem.At(layer, type)] = 0;
    }
  }
  return Solve(problem, floor, {assignment}, {}, seconds).assignment;
}

std::vector<double> UnitsAt(const Problem& problem, const std::vector<int32_t>& assignment,
                            double tau) {
  std::vector<double> units;
  for (const Stage& stage : Stages(problem, assignment)) units.push_back(stage.terms.Units(tau));
  return units;
}

}  // namespace

void BindExact(nb::module_& m) {
  nb::class_<Found>(m, "Found", "What the exact solver found; see scheduler/engine/exact/exact.h.")
      .def_ro("assignment", &Found::assignment)
      .def_ro("value", &Found::value)
      .def_ro("bound", &Found::bound)
      .def_ro("hard_tau", &Found::hard_tau)
      .def_ro("fastest", &Found::fastest)
      .def_ro("fastest_tau", &Found::fastest_tau)
      .def_ro("paces", &Found::paces);
  m.def("solve", &SolveReleased, "problem"_a, "floor"_a, "starts"_a, "seconds"_a,
        "known"_a = std::vector<std::pair<double, double>>(),
        "Find the least tau * price an hour over all assignments, and a bound below all.");
  m.def("cut", &Cut, "problem"_a, "assignment"_a, "floor"_a, "seconds"_a,
        "The assignment of the cheapest plan with the same types, whose stages side by side on one "
        "type are cut anywhere; empty where none is found.");
  m.def("units", &UnitsAt, "problem"_a, "assignment"_a, "tau"_a,
        "Fewest units of each stage with ET <= tau, s a sample; infinite where no number is "
        "enough.");
  m.def(
      "fastest",
      [](const Problem& problem, const std::vector<int32_t>& assignment) {
        return FastestTau(problem, Stages(problem, assignment));
      },
      "problem"_a, "assignment"_a,
      "Least ET of the slowest stage of an assignment within limits and cap, s a sample; infinite "
      "where there are no such units.");
}

}  // namespace heterps::scheduler
