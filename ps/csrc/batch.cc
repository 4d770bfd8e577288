#include "batch.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hash.h"
#include "platform.h"

namespace heterps::ps {
namespace {
constexpr size_t kAhead = 12;
}

void FindUnique(const void* keys, size_t n, Unique* out) {
  struct Slot {
    uint64_t key;
    int64_t index;  // into out->keys; -1 when empty
  };
  // Grows with the number of distinct keys: skewed batches stay in cache.
  size_t capacity = std::max<size_t>(256, std::bit_ceil(n / 2 + 1));
  std::vector<Slot> slots(capacity, Slot{0, -1});
  uint64_t mask = capacity - 1;
  out->keys.clear();
  out->keys.reserve(std::min<size_t>(n, capacity));
  out->inverse.resize(n);
  auto place = [&](uint64_t key) -> Slot& {
    for (uint64_t i = Mix(key) & mask;; i = (i + 1) & mask) {
      if (slots[i].index < 0 || slots[i].key == key) return slots[i];
    }
  };
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(&slots[Mix(LoadKey(keys, i + kAhead)) & mask]);
    const uint64_t key = LoadKey(keys, i);
    Slot* slot = &place(key);
    if (slot->index < 0) {
      if (out->keys.size() * 3 >= capacity * 2) {
        capacity *= 2;
        mask = capacity - 1;
        slots.assign(capacity, Slot{0, -1});
        for (size_t u = 0; u < out->keys.size(); ++u) {
          place(out->keys[u]) = {out->keys[u], static_cast<int64_t>(u)};
        }
        slot = &place(key);
      }
      *slot = {key, static_cast<int64_t>(out->keys.size())};
      out->keys.push_back(key);
    }
    out->inverse[i] = slot->index;
  }
}

std::vector<Part> Partition(const void* keys, size_t n, uint32_t shards) {
  std::vector<Part> parts(shards);
  std::vector<size_t> counts(shards, 0);
  for (size_t i = 0; i < n; ++i) ++counts[ShardOf(Mix(LoadKey(keys, i)), shards)];
  for (uint32_t s = 0; s < shards; ++s) {
    parts[s].keys.reserve(counts[s]);
    parts[s].positions.reserve(counts[s]);
  }
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = LoadKey(keys, i);
    Part& part = parts[ShardOf(Mix(key), shards)];
    part.keys.push_back(key);
    part.positions.push_back(static_cast<int64_t>(i));
  }
  return parts;
}

void CopyRows(const void* const* rows, const int64_t* inverse, size_t n, size_t bytes, void* to) {
  char* out = static_cast<char*>(to);
  auto row = [&](size_t i) { return inverse ? rows[inverse[i]] : rows[i]; };
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(row(i + kAhead));
    std::memcpy(out + i * bytes, row(i), bytes);
  }
}

HETERPS_CLONES
void SegmentSum(const int64_t* inverse, const void* grads, size_t n, size_t dim, float* sums) {
  const auto* values = static_cast<const UnalignedFloat*>(grads);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(sums + static_cast<size_t>(inverse[i + kAhead]) * dim);
    float* __restrict sum = sums + static_cast<size_t>(inverse[i]) * dim;
    const UnalignedFloat* __restrict g = values + i * dim;
    for (size_t j = 0; j < dim; ++j) sum[j] += g[j];
  }
}

}  // namespace heterps::ps
