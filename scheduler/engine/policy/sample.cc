#include "policy/sample.h"

#include "policy/player.h"

namespace heterps::scheduler {

std::vector<int32_t> Sample(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            int count, float temperature, uint64_t seed) {
  return ForEachPace(paces.size(), seed, [&](size_t n, uint64_t own) {
    std::vector<int32_t> assignments;
    Player player(network, paces[n], Encode(network, *paces[n]), own);
    int layers = paces[n]->problem().layers;
    for (int draw = 0; draw < count; ++draw) {
      Episode episode = player.Play(draw == 0 ? 0 : layers, temperature);
      if (!episode.done()) continue;
      assignments.insert(assignments.end(), episode.assignment().begin(),
                         episode.assignment().end());
    }
    return assignments;
  });
}

Trace Replay(const Network& network, const std::shared_ptr<Pace>& pace, const int32_t* assignment) {
  int layers = pace->problem().layers, types = pace->problem().types;
  size_t row = static_cast<size_t>(types) * network.width();
  Trace trace{std::vector<float>(static_cast<size_t>(layers) * types, 0.0F),
              std::vector<float>(layers, 0.0F)};
  std::vector<uint8_t> mask(types);
  std::vector<float> state(static_cast<size_t>(types) * kStateFeatures), logits(types);
  std::vector<float> encoded = network.Encode(pace->features().data(), layers, types);
  Episode episode(pace);
  for (int layer = 0; layer < layers; ++layer) {
    episode.Mask(mask.data());
    if (!mask[assignment[layer]]) episode.Room(mask.data(), 1);
    if (!mask[assignment[layer]]) break;
    episode.Observe(mask.data(), state.data());
    network.Score(&encoded[layer * row], state.data(), mask.data(), types, logits.data(),
                  &trace.values[layer]);
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
