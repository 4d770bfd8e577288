#include "problem/problem.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings/bindings.h"
#include "exact/step_search.h"
#include "problem/provision.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

// Of one assignment among many; steps that are not flushed take longer to simulate.
constexpr StepEffort kEachFlushed{1'500, false, 1e9, 60}, kEachStale{1'500, false, 1e9, 6};

using Table = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Joined = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Assignments = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<double> Copied(const Problem& problem, const Table& table) {
  if (table.shape(0) != static_cast<size_t>(problem.layers) ||
      table.shape(1) != static_cast<size_t>(problem.types)) {
    throw std::invalid_argument("expected arrays of shape [layers, types]");
  }
  return {table.data(), table.data() + table.size()};
}

std::vector<double> Copied(const Problem& problem, const Row& row) {
  if (row.size() != static_cast<size_t>(problem.types)) {
    throw std::invalid_argument("expected arrays of shape [types]");
  }
  return {row.data(), row.data() + row.size()};
}

void Fill(Problem* self, const Mask& allowed, const Table& compute_serial,
          const Table& compute_parallel, const Table& sync_serial, const Table& sync_parallel,
          const Table& transfer_serial, const Table& transfer_parallel, const Table& memory,
          const Table& forward_share, const Table& held, const Table& most_units,
          const Joined& joined, bool cuts, const Row& price, const Row& limit, const Row& capacity,
          double samples, double ps_core_s, int ps_type, double max_price, double batch,
          int micro_batches, int staleness, double crossing, bool whole_batch, bool lockstep,
          const std::optional<Table>& delay, const std::optional<Table>& handled,
          const std::optional<Table>& far, const std::optional<Row>& near) {
  new (self) Problem();
  self->layers = static_cast<int>(allowed.shape(0));
  self->types = static_cast<int>(allowed.shape(1));
  if (self->layers < 1 || self->types < 1 || self->types > kMaxTypes) {
    throw std::invalid_argument("expected 1 to 64 types and at least one layer");
  }
  if (ps_type < 0 || ps_type >= self->types) throw std::invalid_argument("ps_type out of range");
  self->allowed.assign(allowed.data(), allowed.data() + allowed.size());
  self->compute_serial = Copied(*self, compute_serial);
  self->compute_parallel = Copied(*self, compute_parallel);
  self->sync_serial = Copied(*self, sync_serial);
  self->sync_parallel = Copied(*self, sync_parallel);
  self->transfer_serial = Copied(*self, transfer_serial);
  self->transfer_parallel = Copied(*self, transfer_parallel);
  self->memory = Copied(*self, memory);
  self->forward_share = Copied(*self, forward_share);
  self->held = Copied(*self, held);
  self->most_units = Copied(*self, most_units);
  if (joined.size() != static_cast<size_t>(self->layers) || joined.data()[0]) {
    throw std::invalid_argument("expected joined of shape [layers], the first false");
  }
  self->joined.assign(joined.data(), joined.data() + joined.size());
  self->cuts = cuts;
  self->price = Copied(*self, price);
  self->limit = Copied(*self, limit);
  self->capacity = Copied(*self, capacity);
  self->samples = samples;
  self->ps_core_s = ps_core_s;
  self->ps_type = ps_type;
  self->max_price = max_price;
  self->batch = batch;
  self->micro_batches = micro_batches;
  self->staleness = staleness;
  self->crossing = crossing;
  self->delay = delay ? Copied(*self, *delay) : std::vector<double>(allowed.size(), 0.0);
  self->handled = handled ? Copied(*self, *handled) : std::vector<double>(allowed.size(), 0.0);
  self->far = far ? Copied(*self, *far) : std::vector<double>(allowed.size(), 0.0);
  self->near = near ? Copied(*self, *near) : std::vector<double>(self->types, kInf);
  self->whole_batch = whole_batch;
  self->lockstep = lockstep;
}

std::vector<std::tuple<int, int, int>> SplitOne(const Problem& problem,
                                                const std::vector<int32_t>& assignment) {
  std::vector<Stage> stages;
  std::vector<std::tuple<int, int, int>> found;
  if (assignment.size() != static_cast<size_t>(problem.layers) ||
      !Split(problem, assignment.data(), &stages)) {
    return found;
  }
  for (const Stage& stage : stages) found.emplace_back(stage.first, stage.last, stage.type);
  return found;
}

nb::tuple ProvisionAll(const Problem& problem, const Assignments& assignments, double floor,
                       double incumbent, double slack, bool share) {
  size_t count = assignments.shape(0);
  if (assignments.shape(1) != static_cast<size_t>(problem.layers)) {
    throw std::invalid_argument("expected assignments of shape [n, layers]");
  }
  std::vector<double> values(count), taus(count);
  {
    nb::gil_scoped_release release;
    std::vector<Stage> stages;
    for (size_t n = 0; n < count; ++n) {
      Provisioned found;
      if (Split(problem, assignments.data() + n * problem.layers, &stages)) {
        if (problem.micro_batches) {
          const StepEffort& effort = problem.staleness ? kEachStale : kEachFlushed;
          StepFound steps = SolveSteps(problem, floor, effort, {}, &stages, incumbent);
          found = {steps.value, steps.slowest};
        } else {
          found = Provision(problem, stages, floor, incumbent, slack);
        }
      }
      values[n] = found.value;
      taus[n] = found.tau;
      if (share) incumbent = std::min(incumbent, found.value);
    }
  }
  return nb::make_tuple(Owned(std::move(values), {count}), Owned(std::move(taus), {count}));
}

}  // namespace

void BindProblem(nb::module_& m) {
  nb::class_<Problem>(m, "Problem", "Layer costs, prices and limits; see scheduler.cost.CostModel.")
      .def("__init__", &Fill, "allowed"_a, "compute_serial"_a, "compute_parallel"_a,
           "sync_serial"_a, "sync_parallel"_a, "transfer_serial"_a, "transfer_parallel"_a,
           "memory"_a, "forward_share"_a, "held"_a, "most_units"_a, "joined"_a, "cuts"_a, "price"_a,
           "limit"_a, "capacity"_a, "samples"_a, "ps_core_s"_a, "ps_type"_a, "max_price"_a,
           "batch"_a = 0.0, "micro_batches"_a = 0, "staleness"_a = 0, "crossing"_a = 0.0,
           "whole_batch"_a = false, "lockstep"_a = false, "delay"_a = nb::none(),
           "handled"_a = nb::none(), "far"_a = nb::none(), "near"_a = nb::none())
      .def_ro("layers", &Problem::layers)
      .def_ro("types", &Problem::types)
      .def_ro("cuts", &Problem::cuts);
  m.def(
      "split", &SplitOne, "problem"_a, "assignment"_a,
      "First layer, last layer and type of each stage of an assignment; none where it cannot run.");
  m.def("provision", &ProvisionAll, "problem"_a, "assignments"_a, "floor"_a, "incumbent"_a = kInf,
        "slack"_a = 0.0, "share"_a = false,
        "Return (value, tau) of the cheapest units of each assignment, int32 [n, layers]; value is "
        "tau * price an hour, infinite where none meets the demands. With `share` only assignments "
        "better than those before get a value.");
}

}  // namespace heterps::scheduler
