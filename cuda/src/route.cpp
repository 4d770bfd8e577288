#include "heterps/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace heterps {
namespace {

inline float key(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

// Insertion into a list of k: a later expert moves ahead only when strictly greater, which gives
// ties to the lower index.
void top_k(const float* logits, int64_t experts, int64_t k, float* best, int32_t* chosen) {
  for (int64_t e = 0; e < experts; ++e) {
    const float value = key(logits[e]);
    int64_t slot = std::min(e, k);
    if (slot == k) {
      if (!(value > best[k - 1])) continue;
      --slot;
    }
    for (; slot > 0 && value > best[slot - 1]; --slot) {
      best[slot] = best[slot - 1];
      chosen[slot] = chosen[slot - 1];
    }
    best[slot] = value;
    chosen[slot] = static_cast<int32_t>(e);
  }
}

}  // namespace

void route_cpu(const RouteArgs& args) {
  const auto [logits, tokens, experts, k, chosen, order, inverse, offsets] = args;
  std::vector<float> best(k);
  std::vector<int64_t> next(experts, 0);  // counts, then the next free position of each expert
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* row = chosen + t * k;
    top_k(logits + t * experts, experts, k, best.data(), row);
    for (int64_t j = 0; j < k; ++j) ++next[row[j]];
  }
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + next[e];
    next[e] = offsets[e];
  }
  const int64_t pairs = tokens * k;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t position = next[chosen[i]]++;
    order[position] = i;
    inverse[i] = position;
  }
}

}  // namespace heterps
