// The policy at play: draws the layers of episodes at one pace.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "policy/episode.h"
#include "policy/network.h"
#include "problem/parallel.h"
#include "problem/random.h"

namespace heterps::scheduler {

// The network's view of a pace, which all episodes at it share.
using Encoded = std::shared_ptr<const std::vector<float>>;
inline Encoded Encode(const Network& network, const Pace& pace) {
  return std::make_shared<const std::vector<float>>(
      network.Encode(pace.features().data(), pace.problem().layers, pace.problem().types));
}

// Plays episodes at one pace.
class Player {
 public:
  Player(const Network& network, std::shared_ptr<Pace> pace, Encoded encoded, uint64_t seed)
      : network_(network),
        pace_(std::move(pace)),
        layers_(pace_->problem().layers),
        types_(pace_->problem().types),
        encoded_(std::move(encoded)),
        mask_(types_),
        state_(static_cast<size_t>(types_) * kStateFeatures),
        logits_(types_),
        random_(seed) {}

  // Between 0 and 1.
  double Random() { return Uniform(&random_); }

  // Draws every layer by the policy, the first `drawn` at `temperature` and the others as what is
  // likeliest. Not done where the mask leaves nothing.
  Episode Play(int drawn, float temperature) {
    Episode episode(pace_);
    for (int layer = 0; layer < layers_; ++layer) {
      episode.Mask(mask_.data());
      int type = Draw(episode, layer < drawn ? temperature : 0);
      if (type < 0) break;
      episode.Step(type);
    }
    return episode;
  }

  // What happens to the layers [from, to).
  struct Window {
    int from, to;
  };

  // How they are drawn anew: with `first`, the likeliest types follow the first layer of a window;
  // with `whole`, the others of a window follow the first where they can; with `other`, the first
  // layer of all moves to another type, as drawing what was there before is a waste. `slack` times
  // the limits may be taken.
  struct Manner {
    float temperature;
    bool first, other;
    double slack;
    bool whole = false;
  };

  // Draws the layers of `windows`, in order, anew and keeps the others; whether every layer has a
  // type.
  //
  // It looks no further ahead than the units that are left: the kept layers are a way to finish,
  // or the price says no.
  bool Redraw(const int32_t* before, const std::vector<Window>& windows, const Manner& manner,
              Episode* episode) {
    int at = 0;
    for (const Window& window : windows) {
      for (; at < window.from; ++at) episode->Step(Kept(before, at, *episode));
      for (; at < window.to; ++at) {
        episode->Room(mask_.data(), manner.slack);
        bool other = manner.other && at == windows[0].from && !pace_->problem().joined[at];
        if (other) mask_[before[at]] = 0;
        bool follows = at > window.from;
        int type = manner.whole && follows && mask_[episode->assignment().back()]
                       ? episode->assignment().back()
                       : Draw(*episode, manner.first && follows ? 0 : manner.temperature);
        if (type < 0) return false;
        episode->Step(type);
      }
    }
    for (; at < layers_; ++at) episode->Step(Kept(before, at, *episode));
    return true;
  }

 private:
  // What keeping a layer means: joined ones follow the layer before.
  int Kept(const int32_t* before, int at, const Episode& episode) const {
    return pace_->problem().joined[at] ? episode.assignment().back() : before[at];
  }
  // A type that the mask leaves, -1 where it leaves none.
  int Draw(const Episode& episode, float temperature) {
    int open = 0, chosen = -1;
    for (int t = 0; t < types_; ++t) {
      if (mask_[t]) ++open, chosen = t;
    }
    if (open < 2) return chosen;
    episode.Observe(mask_.data(), state_.data());
    size_t row = static_cast<size_t>(episode.layer()) * types_ * network_.width();
    network_.Score(&(*encoded_)[row], state_.data(), mask_.data(), types_, logits_.data(), nullptr);
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
  Encoded encoded_;
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

}  // namespace heterps::scheduler
