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
      Episode episode = player.Play(draw == 0 ? 0 : layers, temperature, draw % 2);
      if (!episode.done()) continue;
      assignments.insert(assignments.end(), episode.assignment().begin(),
                         episode.assignment().end());
    }
    return assignments;
  });
}

Trace Replay(const Network& network, const std::shared_ptr<Pace>& pace, const int32_t* assignment) {
  int layers = pace->problem().layers, types = pace->problem().types;
  Trace trace{std::vector<float>(static_cast<size_t>(layers) * types, 0.0F),
              std::vector<float>(layers, 0.0F)};
  View view(network, Encode(network, *pace), types);
  Episode episode(pace);
  for (int layer = 0; layer < layers; ++layer) {
    Episode next(episode);
    next.Keep(assignment);
    bool cut = next.cut();
    auto taken = [&] { return view.open(cut ? view.cut() : next.type()); };
    view.Open(episode, cut);
    if (!taken()) view.OpenRoom(episode, 1, cut);
    if (!taken()) break;
    const float* logits = view.Score(episode, &trace.values[layer]);
    float* chances = &trace.chances[static_cast<size_t>(layer) * types];
    float most = -std::numeric_limits<float>::infinity(), total = 0;
    for (int n = 0; n < view.options(); ++n) {
      if (view.open(n)) most = std::max(most, logits[n]);
    }
    for (int n = 0; n < view.options(); ++n) {
      float chance = view.open(n) ? std::exp(logits[n] - most) : 0.0F;
      chances[n == view.cut() ? std::max(episode.type(), 0) : n] += chance;
      total += chance;
    }
    for (int t = 0; t < types; ++t) chances[t] /= total;
    episode = std::move(next);
  }
  return trace;
}

}  // namespace heterps::scheduler
