#include "heterps/route.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace heterps {
namespace {

// Ascends as the logit does, NaN being the least, and among equal ones descends as the expert does.
inline int64_t key(float logit, int64_t expert) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  const float value = std::isnan(logit) ? kLeast : logit + 0.0f;  // -0 becomes 0
  const int32_t bits = std::bit_cast<int32_t>(value);
  const int64_t order = bits ^ ((bits >> 31) & 0x7fffffff);
  return (order << 32) + (0xffffffff - expert);
}

inline int64_t greatest(const int64_t* keys, int64_t n) {
  int64_t best = keys[0];
  for (int64_t i = 1; i < n; ++i) best = keys[i] > best ? keys[i] : best;
  return best;
}

// A tournament: of blocks of experts the greatest are kept, so that whichever is chosen next takes
// a look at these and, to replace it, at its block. Nothing is branched on but whether all is done.
class Tournament {
 public:
  explicit Tournament(int64_t experts)
      : experts_(experts),
        block_(std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(experts))))),
        keys_(experts),
        best_((experts + block_ - 1) / block_) {}

  void choose(const float* logits, int64_t k, int32_t* chosen) {
    for (int64_t e = 0; e < experts_; ++e) keys_[e] = key(logits[e], e);
    for (int64_t b = 0; b < static_cast<int64_t>(best_.size()); ++b) renew(b);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t most = greatest(best_.data(), static_cast<int64_t>(best_.size()));
      const int64_t expert = 0xffffffff - (most & 0xffffffff);
      chosen[j] = static_cast<int32_t>(expert);
      keys_[expert] = std::numeric_limits<int64_t>::min();
      renew(expert / block_);
    }
  }

 private:
  void renew(int64_t b) {
    const int64_t begin = b * block_;
    best_[b] = greatest(keys_.data() + begin, std::min(block_, experts_ - begin));
  }

  int64_t experts_;
  int64_t block_;
  std::vector<int64_t> keys_;
  std::vector<int64_t> best_;
};

void check_chosen(int32_t chosen, int64_t experts) {
  if (chosen < 0 || chosen >= experts) {
    throw std::out_of_range("chosen holds " + std::to_string(chosen) + ", expected 0 to " +
                            std::to_string(experts - 1));
  }
}

}  // namespace

void choose_cpu(const Choice& choice, int threads) {
  const auto [logits, tokens, experts, k, chosen] = choice;
  constexpr int64_t kCost = 4;  // of a key, in those of an element that is copied
  parallel_parts(tokens, kCost * (experts + k), threads, [&](int64_t begin, int64_t end) {
    Tournament tournament(experts);
    for (int64_t t = begin; t < end; ++t) {
      tournament.choose(logits + t * experts, k, chosen + t * k);
    }
  });
}

void group_cpu(const Grouping& grouping) {
  const auto [chosen, pairs, experts, order, inverse, offsets] = grouping;
  std::vector<int64_t> next(experts, 0);  // counts, then the next free position of each expert
  for (int64_t i = 0; i < pairs; ++i) {
    check_chosen(chosen[i], experts);
    ++next[chosen[i]];
  }
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + next[e];
    next[e] = offsets[e];
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t position = next[chosen[i]]++;
    order[position] = i;
    inverse[i] = position;
  }
}

void weigh_cpu(const Weighing& weighing, const float* logits, float* weights, int threads) {
  const auto [chosen, tokens, experts, k] = weighing;
  constexpr int64_t kCost = 16;  // of an exponential
  parallel_parts(tokens, kCost * k, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* to = weights + t * k;
      float most = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        const int32_t expert = chosen[t * k + j];
        check_chosen(expert, experts);
        to[j] = logits[t * experts + expert];
        most = std::max(most, to[j]);
      }
      for (int64_t j = 0; j < k; ++j) sum += to[j] = std::exp(to[j] - most);
      for (int64_t j = 0; j < k; ++j) to[j] /= sum;
    }
  });
}

void weigh_backward_cpu(const Weighing& weighing, const float* weights, const float* grad,
                        float* gradient, int threads) {
  const auto [chosen, tokens, experts, k] = weighing;
  parallel_parts(tokens, experts + k, threads, [&](int64_t begin, int64_t end) {
    std::fill(gradient + begin * experts, gradient + end * experts, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      const float* weight = weights + t * k;
      const float* of = grad + t * k;
      float mean = 0;
      for (int64_t j = 0; j < k; ++j) mean += weight[j] * of[j];
      for (int64_t j = 0; j < k; ++j) {
        const int32_t expert = chosen[t * k + j];
        check_chosen(expert, experts);
        gradient[t * experts + expert] = weight[j] * (of[j] - mean);
      }
    }
  });
}

}  // namespace heterps
