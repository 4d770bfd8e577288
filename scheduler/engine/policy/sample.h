// Plans sampled from the policy: episodes played by the network.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy/episode.h"
#include "policy/network.h"

namespace heterps::scheduler {

// Plays `count` episodes at each pace: the first takes the likeliest type at every layer, the
// others draw from the policy at `temperature`. The same seed draws the same. Returns the
// assignments, [samples, layers].
std::vector<int32_t> Sample(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            int count, float temperature, uint64_t seed);

// What the policy thought of a complete assignment, layer by layer.
struct Trace {
  std::vector<float> chances;  // [layers, types], 0 where masked; of a stage cut or not together
  std::vector<float> values;   // [layers], the reward to come
};

// Replays `assignment`; where the look-ahead has not found that it can be finished, among the types
// that there is room for.
Trace Replay(const Network& network, const std::shared_ptr<Pace>& pace, const int32_t* assignment);

}  // namespace heterps::scheduler
