#include "policy/network.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings/bindings.h"
#include "policy/revise.h"
#include "policy/sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

using Singles = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

void Make(Network* self, const std::map<std::string, Singles>& weights,
          const std::vector<int>& distances, int heads, int blocks) {
  Weights held;
  for (const auto& [name, array] : weights) {
    Tensor& tensor = held[name];
    for (size_t n = 0; n < array.ndim(); ++n) tensor.shape.push_back(array.shape(n));
    tensor.values.assign(array.data(), array.data() + array.size());
  }
  new (self) Network(held, distances, heads, blocks);
}

void CheckPaces(const std::vector<std::shared_ptr<Pace>>& paces) {
  for (const auto& pace : paces) {
    if (pace->problem().layers != paces[0]->problem().layers ||
        pace->problem().types != paces[0]->problem().types) {
      throw std::invalid_argument("expected paces of one problem");
    }
  }
}

using Assignment = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Types, with cuts as `Split` has them.
void CheckAssignment(const Problem& p, const int32_t* assignment) {
  for (int l = 0; l < p.layers; ++l) {
    int32_t code = assignment[l];
    if (code < 0 || code >= (p.cuts ? 2 : 1) * p.types || !p.allowed[p.At(l, code % p.types)]) {
      throw std::invalid_argument("expected a type for each layer that may run it");
    }
  }
}

auto SampleAll(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces, int count,
               float temperature, uint64_t seed) {
  if (paces.empty()) throw std::invalid_argument("expected at least one pace");
  CheckPaces(paces);
  size_t layers = paces[0]->problem().layers;
  std::vector<int32_t> assignments;
  {
    nb::gil_scoped_release release;
    assignments = Sample(network, paces, count, temperature, seed);
  }
  size_t found = assignments.size() / layers;
  return Owned(std::move(assignments), {found, layers});
}

auto ReviseAll(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
               const nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& starts,
               int trials, int window, float temperature, double heat, double slack, uint64_t seed,
               double floor) {
  if (paces.empty() || starts.shape(0) != paces.size()) {
    throw std::invalid_argument("expected an assignment for each pace");
  }
  if (trials < 0 || window < 1) throw std::invalid_argument("expected trials and a window");
  CheckPaces(paces);
  size_t layers = paces[0]->problem().layers;
  if (starts.shape(1) != layers) throw std::invalid_argument("expected a type for each layer");
  const Problem& p = paces[0]->problem();
  for (size_t n = 0; n < paces.size(); ++n) CheckAssignment(p, starts.data() + n * layers);
  ReviseSettings settings{trials, window, temperature, heat, slack, floor};
  std::vector<int32_t> found;
  {
    nb::gil_scoped_release release;
    found = Revise(network, paces, starts.data(), settings, seed);
  }
  size_t count = found.size() / layers;
  return Owned(std::move(found), {count, layers});
}

nb::tuple ReplayOne(const Network& network, const std::shared_ptr<Pace>& pace,
                    const Assignment& assignment) {
  size_t layers = pace->problem().layers, types = pace->problem().types;
  if (assignment.size() != layers) throw std::invalid_argument("expected a type for each layer");
  CheckAssignment(pace->problem(), assignment.data());
  Trace trace = Replay(network, pace, assignment.data());
  return nb::make_tuple(Owned(std::move(trace.chances), {layers, types}),
                        Owned(std::move(trace.values), {layers}));
}

}  // namespace

void BindNetwork(nb::module_& m) {
  nb::class_<Network>(m, "Network", "The policy's network, forward only.")
      .def("__init__", &Make, "weights"_a, "distances"_a, "heads"_a, "blocks"_a)
      .def(
          "encode",
          [](const Network& network, const Pace& pace) {
            size_t layers = pace.problem().layers, types = pace.problem().types;
            size_t width = network.width();
            auto encoded = network.Encode(pace.features().data(), static_cast<int>(layers),
                                          static_cast<int>(types));
            return Owned(std::move(encoded), {layers, types, width});
          },
          "pace"_a)
      .def(
          "score",
          [](const Network& network,
             const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& encoded,
             const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& state,
             const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& mask) {
            size_t types = mask.size();
            if (encoded.shape(0) != types || state.shape(0) != types ||
                encoded.shape(1) != static_cast<size_t>(network.width()) ||
                state.shape(1) != kStateFeatures) {
              throw std::invalid_argument("expected arrays for the same types");
            }
            std::vector<float> logits(types);
            float value = 0;
            network.Score(encoded.data(), state.data(), mask.data(), static_cast<int>(types),
                          logits.data(), &value);
            return nb::make_tuple(Owned(std::move(logits), {types}), value);
          },
          "encoded"_a, "state"_a, "mask"_a)
      .def("sample", &SampleAll, "paces"_a, "count"_a, "temperature"_a, "seed"_a,
           "Play `count` episodes at each pace, the first without chance: int32 [n, L].")
      .def("revise", &ReviseAll, "paces"_a, "assignments"_a, "trials"_a, "window"_a,
           "temperature"_a, "heat"_a, "slack"_a, "seed"_a, "floor"_a = 0.0,
           "Draw parts of a plan at each pace anew: ever cheaper plans, int32 [n, L]; those of "
           "simulated steps reach `floor`.")
      .def("replay", &ReplayOne, "pace"_a, "assignment"_a,
           "What the policy thought of an assignment: chances [L, T], values [L].");
}

}  // namespace heterps::scheduler
