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

// What the policy thinks of an episode's next layer: of each type, and of another stage on the type
// of the current one, which comes last.
class View {
 public:
  View(const Network& network, Encoded encoded, int types)
      : network_(network),
        encoded_(std::move(encoded)),
        types_(types),
        mask_(types + 1),
        state_((static_cast<size_t>(types) + 1) * kStateFeatures),
        logits_(types + 1),
        rows_((static_cast<size_t>(types) + 1) * network.width()) {}

  // Opens what the pace allows, or what `slack` times the limits have room for. Another stage on
  // the same type is open without `cuts` only where nothing else is.
  void Open(const Episode& episode, bool cuts) {
    episode.Mask(mask_.data());
    mask_[types_] = (cuts || None()) && episode.MayCut();
  }
  void OpenRoom(const Episode& episode, double slack, bool cuts) {
    episode.Room(mask_.data(), slack);
    mask_[types_] = (cuts || None()) && episode.RoomToCut(slack);
  }
  void Close(int option) { mask_[option] = 0; }
  bool open(int option) const { return mask_[option]; }
  int options() const { return types_ + 1; }
  int cut() const { return types_; }

  // Logits of what is open, and the value unless that is null.
  const float* Score(const Episode& episode, float* value) {
    episode.Observe(mask_.data(), state_.data());
    size_t width = network_.width();
    const float* rows = &(*encoded_)[static_cast<size_t>(episode.layer()) * types_ * width];
    int count = types_;
    if (mask_[types_]) {
      episode.ObserveCut(&state_[static_cast<size_t>(types_) * kStateFeatures]);
      std::copy_n(rows, types_ * width, rows_.begin());
      std::copy_n(rows + episode.type() * width, width, rows_.begin() + types_ * width);
      rows = rows_.data();
      ++count;
    }
    network_.Score(rows, state_.data(), mask_.data(), count, logits_.data(), value);
    return logits_.data();
  }

 private:
  bool None() const { return std::find(mask_.begin(), mask_.end() - 1, 1) == mask_.end() - 1; }

  const Network& network_;
  Encoded encoded_;
  int types_;
  std::vector<uint8_t> mask_;
  std::vector<float> state_, logits_, rows_;
};

// Share of what is drawn anew with cuts where they are not needed.
constexpr double kCuts = 0.25;

// Plays episodes at one pace.
class Player {
 public:
  Player(const Network& network, std::shared_ptr<Pace> pace, Encoded encoded, uint64_t seed)
      : pace_(std::move(pace)),
        layers_(pace_->problem().layers),
        view_(network, std::move(encoded), pace_->problem().types),
        random_(seed) {}

  // Between 0 and 1.
  double Random() { return Uniform(&random_); }

  // Draws every layer by the policy, the first `drawn` at `temperature` and the others as what is
  // likeliest, with `cuts` of stages where they are not needed. Not done where the mask leaves
  // nothing.
  Episode Play(int drawn, float temperature, bool cuts) {
    Episode episode(pace_);
    for (int layer = 0; layer < layers_; ++layer) {
      view_.Open(episode, cuts);
      int option = Draw(episode, layer < drawn ? temperature : 0);
      if (option < 0) break;
      Take(option, &episode);
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
    int at = 0, types = pace_->problem().types;
    bool cuts = pace_->problem().cuts && Random() < kCuts;
    for (const Window& window : windows) {
      for (; at < window.from; ++at) episode->Keep(before);
      for (; at < window.to; ++at) {
        view_.OpenRoom(*episode, manner.slack, cuts);
        bool other = manner.other && at == windows[0].from && !pace_->problem().joined[at];
        if (other) {
          bool cut = at > 0 && before[at] != before[at - 1] &&
                     before[at] % types == before[at - 1] % types;
          view_.Close(cut ? view_.cut() : before[at] % types);
        }
        bool follows = at > window.from;
        int option = manner.whole && follows && view_.open(episode->type())
                         ? episode->type()
                         : Draw(*episode, manner.first && follows ? 0 : manner.temperature);
        if (option < 0) return false;
        Take(option, episode);
      }
    }
    for (; at < layers_; ++at) episode->Keep(before);
    return true;
  }

 private:
  void Take(int option, Episode* episode) {
    if (option == view_.cut()) {
      episode->Cut();
    } else {
      episode->Step(option);
    }
  }
  // What is open, -1 where nothing is.
  int Draw(const Episode& episode, float temperature) {
    int open = 0, chosen = -1;
    for (int n = 0; n < view_.options(); ++n) {
      if (view_.open(n)) ++open, chosen = n;
    }
    if (open < 2) return chosen;
    const float* logits = view_.Score(episode, nullptr);
    float best = -std::numeric_limits<float>::infinity();
    for (int n = 0; n < view_.options(); ++n) {
      if (!view_.open(n)) continue;
      // Gumbel noise makes the largest a draw from the softmax.
      double noise = temperature > 0 ? -std::log(-std::log(Uniform(&random_))) * temperature : 0;
      float score = logits[n] + static_cast<float>(noise);
      if (score > best) best = score, chosen = n;
    }
    return chosen;
  }

  std::shared_ptr<Pace> pace_;
  int layers_;
  View view_;
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
