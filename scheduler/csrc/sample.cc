#include "sample.h"

#include "parallel.h"

namespace heterps::scheduler {
namespace {

// SplitMix64: the same numbers everywhere.
double Uniform(uint64_t* state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ULL);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  return (static_cast<double>(z >> 11) + 0.5) * 0x1.0p-53;
}

// Plays episodes at one pace.
class Player {
 public:
  Player(const Network& network, std::shared_ptr<Pace> pace, uint64_t seed)
      : network_(network),
        pace_(std::move(pace)),
        layers_(pace_->problem().layers),
        types_(pace_->problem().types),
        encoded_(network.Encode(pace_->features().data(), layers_, types_)),
        mask_(types_),
        state_(static_cast<size_t>(types_) * kDynamic),
        logits_(types_),
        random_(seed) {}

  // Keeps the first `kept` layers of `before`, draws up to layer `drawn`, and takes the likeliest
  // types for the rest. Not done where the mask leaves nothing.
  Episode Play(const int32_t* before, int kept, int drawn, float temperature) {
    Episode episode(pace_);
    for (int layer = 0; layer < kept; ++layer) episode.Step(before[layer]);
    for (int layer = kept; layer < layers_; ++layer) {
      int type = Choose(episode, layer < drawn ? temperature : 0);
      if (type < 0) break;
      episode.Step(type);
    }
    return episode;
  }

 private:
  int Choose(const Episode& episode, float temperature) {
    episode.Mask(mask_.data());
    int open = 0, chosen = -1;
    for (int t = 0; t < types_; ++t) {
      if (mask_[t]) ++open, chosen = t;
    }
    if (open < 2) return chosen;
    episode.Observe(mask_.data(), state_.data());
    size_t row = static_cast<size_t>(episode.layer()) * types_ * network_.width();
    network_.Score(&encoded_[row], state_.data(), mask_.data(), types_, logits_.data());
    float best = -std::numeric_limits<float>::infinity();
    for (int t = 0; t < types_; ++t) {
      if (!mask_[t]) continue;
      // Gumbel noise makes the largest a draw from the softmax.
      double noise = temperature > 0 ? -std::log(-std::log(Uniform(&random_))) * temperature : 0;
      float score = logits_[t] + static_cast<float>(noise);
      if (score > best) best = score, chosen = t;
    }
    return chosen;
  }

  const Network& network_;
  std::shared_ptr<Pace> pace_;
  int layers_, types_;
  std::vector<float> encoded_;
  std::vector<uint8_t> mask_;
  std::vector<float> state_, logits_;
  uint64_t random_;
};

// Runs `work(n, seed of n)` for each pace side by side; the results in the order of the paces.
template <typename Work>
std::vector<int32_t> ForEachPace(size_t count, uint64_t seed, const Work& work) {
  std::vector<std::vector<int32_t>> parts(count);
  ParallelFor(count, [&](size_t n) {
    uint64_t own = seed * 0x9E3779B97F4A7C15ULL + n;
    Uniform(&own);
    parts[n] = work(n, own);
  });
  std::vector<int32_t> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<int32_t> RolloutOne(Player* player, const Pace& pace, const int32_t* assignment,
                                const RolloutSettings& settings) {
  int layers = pace.problem().layers;
  std::vector<int32_t> found, best(assignment, assignment + layers);
  double least = player->Play(best.data(), layers, layers, 0).Price();
  int stride = std::max(1, settings.window / 2);  // windows overlap by half
  for (int sweep = 0; sweep < settings.sweeps; ++sweep) {
    bool better = false;
    for (int from = 0; from < layers; from += stride) {
      for (int draw = 0; draw < settings.draws; ++draw) {
        Episode episode =
            player->Play(best.data(), from, from + settings.window, settings.temperature);
        if (!episode.done()) continue;
        double price = episode.Price();
        if (price >= least * (1 - 1e-12)) continue;
        least = price;
        best = episode.assignment();
        found.insert(found.end(), best.begin(), best.end());
        better = true;
      }
    }
    if (!better) break;
  }
  return found;
}

}  // namespace

std::vector<int32_t> Sample(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            int count, float temperature, uint64_t seed) {
  return ForEachPace(paces.size(), seed, [&](size_t n, uint64_t own) {
    std::vector<int32_t> assignments;
    Player player(network, paces[n], own);
    int layers = paces[n]->problem().layers;
    for (int draw = 0; draw < count; ++draw) {
      Episode episode = player.Play(nullptr, 0, draw == 0 ? 0 : layers, temperature);
      if (!episode.done()) continue;
      assignments.insert(assignments.end(), episode.assignment().begin(),
                         episode.assignment().end());
    }
    return assignments;
  });
}

std::vector<int32_t> Rollout(const Network& network,
                             const std::vector<std::shared_ptr<Pace>>& paces,
                             const int32_t* assignments, const RolloutSettings& settings,
                             uint64_t seed) {
  return ForEachPace(paces.size(), seed, [&](size_t n, uint64_t own) {
    Player player(network, paces[n], own);
    const int32_t* start = assignments + n * paces[n]->problem().layers;
    return RolloutOne(&player, *paces[n], start, settings);
  });
}

Trace Replay(const Network& network, const std::shared_ptr<Pace>& pace, const int32_t* assignment) {
  int layers = pace->problem().layers, types = pace->problem().types;
  size_t row = static_cast<size_t>(types) * network.width();
  Trace trace{std::vector<float>(static_cast<size_t>(layers) * types, 0.0F),
              std::vector<float>(layers, 0.0F)};
  std::vector<uint8_t> mask(types);
  std::vector<float> state(static_cast<size_t>(types) * kDynamic), logits(types);
  std::vector<float> encoded = network.Encode(pace->features().data(), layers, types);
  Episode episode(pace);
  for (int layer = 0; layer < layers; ++layer) {
    episode.Mask(mask.data());
    if (!mask[assignment[layer]]) break;
    episode.Observe(mask.data(), state.data());
    trace.values[layer] =
        network.Score(&encoded[layer * row], state.data(), mask.data(), types, logits.data());
    float* chances = &trace.chances[static_cast<size_t>(layer) * types];
    float most = *std::max_element(logits.begin(), logits.end()), total = 0;
    for (int t = 0; t < types; ++t) {
      total += chances[t] = mask[t] ? std::exp(logits[t] - most) : 0.0F;
    }
    for (int t = 0; t < types; ++t) chances[t] /= total;
    episode.Step(assignment[layer]);
  }
  return trace;
}

}  // namespace heterps::scheduler
