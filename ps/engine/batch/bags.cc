#include "batch/bags.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings/platform.h"

namespace heterps::ps {
namespace {
constexpr size_t kAhead = 12;

// The share of a bag that each of its rows has.
float ShareOf(const Bags& bags, Pooling pooling, size_t bag) {
  if (pooling != Pooling::kMean) return 1.0F;
  size_t there = bags.length;
  if (bags.there) {
    const uint8_t* own = bags.there + bag * bags.length;
    there = static_cast<size_t>(std::count(own, own + bags.length, uint8_t{1}));
  }
  return 1.0F / static_cast<float>(std::max<size_t>(there, 1));
}

HETERPS_CLONES
void PoolSums(const Bags& bags, Pooling pooling, const float* rows, float* out) {
  const size_t n = bags.count * bags.length, dim = bags.dim;
  for (size_t bag = 0, i = 0; bag < bags.count; ++bag) {
    float* __restrict sum = out + bag * dim;
    std::memset(sum, 0, dim * sizeof(float));
    for (size_t end = i + bags.length; i < end; ++i) {
      if (i + kAhead < n) Prefetch(rows + static_cast<size_t>(bags.inverse[i + kAhead]) * dim);
      if (bags.there && !bags.there[i]) continue;
      const float* __restrict row = rows + static_cast<size_t>(bags.inverse[i]) * dim;
      for (size_t j = 0; j < dim; ++j) sum[j] += row[j];
    }
    if (pooling == Pooling::kSum) continue;
    const float share = ShareOf(bags, pooling, bag);
    for (size_t j = 0; j < dim; ++j) sum[j] *= share;
  }
}

HETERPS_CLONES
void PoolHighest(const Bags& bags, const float* rows, float* out, int32_t* picked) {
  const size_t n = bags.count * bags.length, dim = bags.dim;
  for (size_t bag = 0, i = 0; bag < bags.count; ++bag) {
    float* __restrict best = out + bag * dim;
    int32_t* __restrict from = picked + bag * dim;
    bool none = true;
    for (size_t end = i + bags.length; i < end; ++i) {
      if (i + kAhead < n) Prefetch(rows + static_cast<size_t>(bags.inverse[i + kAhead]) * dim);
      if (bags.there && !bags.there[i]) continue;
      const auto at = static_cast<int32_t>(bags.inverse[i]);
      const float* __restrict row = rows + static_cast<size_t>(at) * dim;
      if (none) {
        none = false;
        for (size_t j = 0; j < dim; ++j) best[j] = row[j];
        for (size_t j = 0; j < dim; ++j) from[j] = at;
        continue;
      }
      for (size_t j = 0; j < dim; ++j) {
        const bool higher = (row[j] > best[j]) | (row[j] != row[j]);
        best[j] = higher ? row[j] : best[j];
        from[j] = higher ? at : from[j];
      }
    }
    if (!none) continue;
    std::fill_n(best, dim, 0.0F);
    std::fill_n(from, dim, -1);
  }
}

HETERPS_CLONES
void SpreadSums(const Bags& bags, Pooling pooling, const float* grads, float* out) {
  const size_t n = bags.count * bags.length, dim = bags.dim;
  std::vector<float> scaled(dim);
  for (size_t bag = 0, i = 0; bag < bags.count; ++bag) {
    const float* __restrict grad = grads + bag * dim;
    if (pooling == Pooling::kMean) {
      const float share = ShareOf(bags, pooling, bag);
      for (size_t j = 0; j < dim; ++j) scaled[j] = grad[j] * share;
      grad = scaled.data();
    }
    for (size_t end = i + bags.length; i < end; ++i) {
      if (i + kAhead < n) {
        PrefetchToWrite(out + static_cast<size_t>(bags.inverse[i + kAhead]) * dim);
      }
      if (bags.there && !bags.there[i]) continue;
      float* __restrict sum = out + static_cast<size_t>(bags.inverse[i]) * dim;
      for (size_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
  }
}

}  // namespace

void Pool(const Bags& bags, Pooling pooling, const float* rows, float* out, int32_t* picked) {
  if (pooling == Pooling::kMax) {
    PoolHighest(bags, rows, out, picked);
  } else {
    PoolSums(bags, pooling, rows, out);
  }
}

void PoolGradients(const Bags& bags, Pooling pooling, const float* grads, const int32_t* picked,
                   size_t rows, float* out) {
  std::memset(out, 0, rows * bags.dim * sizeof(float));
  if (pooling != Pooling::kMax) {
    SpreadSums(bags, pooling, grads, out);
    return;
  }
  for (size_t at = 0; at < bags.count * bags.dim; at += bags.dim) {
    for (size_t j = 0; j < bags.dim; ++j) {
      if (picked[at + j] < 0) continue;
      out[static_cast<size_t>(picked[at + j]) * bags.dim + j] += grads[at + j];
    }
  }
}

}  // namespace heterps::ps
