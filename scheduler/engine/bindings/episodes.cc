#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <random>
#include <stdexcept>

#include "bindings/bindings.h"
#include "policy/episode.h"
#include "policy/network.h"
#include "policy/pace.h"
#include "problem/parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::scheduler {
namespace {

// A batch of episodes, padded to `layers` and `types`; all of them step together.
class Episodes {
 public:
  Episodes(std::vector<std::shared_ptr<Pace>> paces, int layers, int types)
      : layers_(layers), types_(types) {
    for (auto& pace : paces) {
      if (pace->problem().layers > layers || pace->problem().types > types) {
        throw std::invalid_argument("an episode is larger than the batch");
      }
      episodes_.emplace_back(std::move(pace));
    }
    masks_.assign(episodes_.size() * types_, 0);
    for (size_t n = 0; n < episodes_.size(); ++n) episodes_[n].Mask(&masks_[n * types_]);
  }

  size_t size() const { return episodes_.size(); }

  void Replace(size_t n, std::shared_ptr<Pace> pace) {
    episodes_.at(n) = Episode(std::move(pace));
    std::fill_n(&masks_[n * types_], types_, 0);
    episodes_[n].Mask(&masks_[n * types_]);
  }

  auto Masks() const {
    std::vector<uint8_t> copy(masks_);
    return Owned(std::move(copy), {size(), static_cast<size_t>(types_)});
  }

  auto Observe() const {
    std::vector<float> features(size() * types_ * kStateFeatures, 0.0F);
    {
      nb::gil_scoped_release release;
      for (size_t n = 0; n < size(); ++n) {
        episodes_[n].Observe(&masks_[n * types_], &features[n * types_ * kStateFeatures]);
      }
    }
    return Owned(std::move(features), {size(), static_cast<size_t>(types_), kStateFeatures});
  }

  auto Teach() const {
    std::vector<double> values(size() * types_, kInf);
    {
      nb::gil_scoped_release release;
      for (size_t n = 0; n < size(); ++n) {
        if (!episodes_[n].done()) episodes_[n].Teach(&masks_[n * types_], &values[n * types_]);
      }
    }
    return Owned(std::move(values), {size(), static_cast<size_t>(types_)});
  }

  // Places the next layer of each episode that is not done; a type not in the mask is refused.
  void Step(const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& kinds) {
    if (kinds.size() != size()) throw std::invalid_argument("expected one type an episode");
    for (size_t n = 0; n < size(); ++n) {
      if (episodes_[n].done()) continue;
      int64_t kind = kinds.data()[n];
      if (kind < 0 || kind >= types_ || !masks_[n * types_ + kind]) {
        throw std::invalid_argument("a type that the mask excludes");
      }
    }
    nb::gil_scoped_release release;
    for (size_t n = 0; n < size(); ++n) {
      if (episodes_[n].done()) continue;
      episodes_[n].Step(static_cast<int>(kinds.data()[n]));
      std::fill_n(&masks_[n * types_], types_, 0);
      episodes_[n].Mask(&masks_[n * types_]);
    }
  }

  auto Done() const {
    std::vector<uint8_t> done(size());
    for (size_t n = 0; n < size(); ++n) done[n] = episodes_[n].done();
    return Owned(std::move(done), {size()});
  }

  auto Prices() const {
    std::vector<double> prices(size());
    for (size_t n = 0; n < size(); ++n) {
      prices[n] = episodes_[n].done() ? episodes_[n].Price() : kInf;
    }
    return Owned(std::move(prices), {size()});
  }

  // Types placed so far, -1 for those to come, [n, layers].
  auto Assignments() const {
    std::vector<int32_t> all(size() * layers_, -1);
    for (size_t n = 0; n < size(); ++n) {
      const auto& own = episodes_[n].assignment();
      std::copy(own.begin(), own.end(), &all[n * layers_]);
    }
    return Owned(std::move(all), {size(), static_cast<size_t>(layers_)});
  }

 private:
  int layers_, types_;
  std::vector<Episode> episodes_;
  std::vector<uint8_t> masks_;
};

// Episodes played softly by the teacher, or every other one by `student`, for the warm start: what
// was seen, and the teacher's values.
nb::tuple Demonstrate(const std::vector<std::shared_ptr<Pace>>& paces, int layers, int types,
                      double temperature, double chance, uint64_t seed, const Network* student) {
  size_t count = paces.size(), L = layers, T = types;
  std::vector<float> dynamic(count * L * T * kStateFeatures, 0.0F);
  std::vector<uint8_t> masks(count * L * T, 0);
  std::vector<double> values(count * L * T, kInf);
  std::vector<double> prices(count, kInf);
  {
    nb::gil_scoped_release release;
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    for (size_t n = 0; n < count; ++n) {
      Episode episode(paces[n]);
      const Problem& p = paces[n]->problem();
      std::vector<float> encoded, logits(p.types);
      if (student && n % 2) {
        encoded = student->Encode(paces[n]->features().data(), p.layers, p.types);
      }
      for (int layer = 0; layer < p.layers; ++layer) {
        size_t at = (n * L + layer) * T;
        episode.Mask(&masks[at]);
        episode.Observe(&masks[at], &dynamic[at * kStateFeatures]);
        episode.Teach(&masks[at], &values[at]);
        double best = kInf;
        int open = 0;
        for (int t = 0; t < p.types; ++t) {
          best = std::min(best, values[at + t]);
          open += masks[at + t] != 0;
        }
        if (!open) break;
        // Boltzmann over the regret relative to the best value, sometimes uniform.
        bool any = uniform(random) < chance || best == kInf;
        double total = 0;
        std::vector<double> weight(p.types, 0.0);
        if (!encoded.empty()) {
          student->Score(&encoded[static_cast<size_t>(layer) * p.types * student->width()],
                         &dynamic[at * kStateFeatures], &masks[at], p.types, logits.data(),
                         nullptr);
          float most = *std::max_element(logits.begin(), logits.end());
          for (int t = 0; t < p.types; ++t) {
            if (masks[at + t]) total += weight[t] = std::exp(logits[t] - most);
          }
        }
        for (int t = 0; t < p.types && encoded.empty(); ++t) {
          if (!masks[at + t]) continue;
          double regret = (values[at + t] - best) / std::max(best, 1e-300);
          weight[t] = any ? 1 : std::exp(-std::min(regret / temperature, 50.0));
          total += weight[t];
        }
        double pick = uniform(random) * total;
        int chosen = -1;
        for (int t = 0; t < p.types; ++t) {
          if (weight[t] <= 0) continue;
          chosen = t;
          if ((pick -= weight[t]) < 0) break;
        }
        episode.Step(chosen);
      }
      if (episode.done()) prices[n] = episode.Price();
    }
  }
  return nb::make_tuple(Owned(std::move(dynamic), {count, L, T, kStateFeatures}),
                        Owned(std::move(masks), {count, L, T}),
                        Owned(std::move(values), {count, L, T}), Owned(std::move(prices), {count}));
}

nb::tuple Names(const std::vector<const char*>& names) {
  nb::list found;
  for (const char* name : names) found.append(name);
  return nb::tuple(found);
}

}  // namespace

void BindEpisodes(nb::module_& m) {
#define HETERPS_NAME(name) #name,
  m.attr("LAYER_FEATURES") = Names({HETERPS_LAYER_FEATURES(HETERPS_NAME)});
  m.attr("STATE_FEATURES") = Names({HETERPS_STATE_FEATURES(HETERPS_NAME)});
#undef HETERPS_NAME
  nb::class_<Pace>(m, "Pace", "A problem at one pace: a throughput to keep, samples/s.")
      .def(
          "__init__",
          [](Pace* self, const Problem& problem, double floor, int nodes, double shadow) {
            if (!(floor > 0) || !std::isfinite(floor)) {
              throw std::invalid_argument("expected a floor above 0");
            }
            auto copy = std::make_shared<const Problem>(problem);
            nb::gil_scoped_release release;
            new (self) Pace(std::move(copy), floor, nodes, shadow);
          },
          "problem"_a, "floor"_a, "nodes"_a = 100'000, "shadow"_a = 0.0)
      .def_prop_ro("floor", &Pace::floor)
      .def_prop_ro("feasible", &Pace::Feasible)
      .def_prop_ro("least_price", &Pace::LeastPrice)
      .def_prop_ro("guided_price", &Pace::GuidedPrice)
      .def_prop_ro("reference", &Pace::reference)
      .def_prop_ro("layers", [](const Pace& p) { return p.problem().layers; })
      .def_prop_ro("types", [](const Pace& p) { return p.problem().types; })
      .def("features", [](const Pace& p) {
        std::vector<float> copy(p.features());
        return Owned(std::move(copy), {static_cast<size_t>(p.problem().layers),
                                       static_cast<size_t>(p.problem().types), kLayerFeatures});
      });
  m.def(
      "paces",
      [](const Problem& problem, const std::vector<double>& floors, int nodes, double shadow) {
        for (double floor : floors) {
          if (!(floor > 0) || !std::isfinite(floor)) {
            throw std::invalid_argument("expected floors above 0");
          }
        }
        auto copy = std::make_shared<const Problem>(problem);
        std::vector<std::shared_ptr<Pace>> made(floors.size()), kept;
        nb::gil_scoped_release release;
        ParallelFor(floors.size(), [&](size_t n) {
          made[n] = std::make_shared<Pace>(copy, floors[n], nodes, shadow);
        });
        for (auto& pace : made) {
          if (pace->Feasible()) kept.push_back(std::move(pace));
        }
        return kept;
      },
      "problem"_a, "floors"_a, "nodes"_a = 100'000, "shadow"_a = 0.0,
      "The paces of a problem at these throughputs that can be kept.");
  nb::class_<Episodes>(m, "Episodes", "Episodes of the placement environment, stepped together.")
      .def(nb::init<std::vector<std::shared_ptr<Pace>>, int, int>(), "paces"_a, "layers"_a,
           "types"_a)
      .def("__len__", &Episodes::size)
      .def("replace", &Episodes::Replace, "index"_a, "pace"_a)
      .def("masks", &Episodes::Masks)
      .def("observe", &Episodes::Observe)
      .def("teach", &Episodes::Teach)
      .def("step", &Episodes::Step, "types"_a)
      .def("done", &Episodes::Done)
      .def("prices", &Episodes::Prices)
      .def("assignments", &Episodes::Assignments);
  m.def("demonstrate", &Demonstrate, "paces"_a, "layers"_a, "types"_a, "temperature"_a, "chance"_a,
        "seed"_a, "student"_a.none() = nb::none(),
        "Play the teacher, or every other time the student: (state features [n, L, T, S], masks "
        "[n, L, T], values [n, L, T], "
        "prices [n]).");
}

}  // namespace heterps::scheduler
