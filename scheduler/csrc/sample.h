// Plans sampled from the policy: episodes played by the network.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "episode.h"
#include "network.h"

namespace heterps::scheduler {

// Plays `count` episodes at each pace: the first takes the likeliest type at every layer, the
// others draw from the policy at `temperature`. The same seed draws the same. Returns the
// assignments, [samples, layers].
std::vector<int32_t> Sample(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            int count, float temperature, uint64_t seed);

// How rollouts draw: `window` layers anew `draws` times, all along the plan, `sweeps` times.
struct RolloutSettings {
  int window, draws, sweeps;
  float temperature;
};

// Draws again around a plan at each pace, as a rollout does (Bertsekas and Castanon 1999): goes
// along its layers, draws the next window of them anew, takes the likeliest types from there on,
// and goes on from the cheapest plan at this pace. Every plan is the policy's from the first new
// layer to the last. `assignments` [paces, layers]; returns the plans that it went on from,
// [n, layers].
std::vector<int32_t> Rollout(const Network& network,
                             const std::vector<std::shared_ptr<Pace>>& paces,
                             const int32_t* assignments, const RolloutSettings& settings,
                             uint64_t seed);

// What the policy thought of a complete assignment, layer by layer.
struct Trace {
  std::vector<float> chances;  // [layers, types], 0 where masked
  std::vector<float> values;   // [layers], the reward to come
};

// Replays `assignment`; stops where the mask excludes it.
Trace Replay(const Network& network, const std::shared_ptr<Pace>& pace, const int32_t* assignment);

}  // namespace heterps::scheduler
