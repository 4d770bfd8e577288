#include "batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "hash.h"
#include "platform.h"

namespace heterps::ps {
namespace {
constexpr size_t kAhead = 12;
}

void FindUnique(const void* keys, size_t n, Unique* out) {
  // A slot is half of a key's hash and 1 + its position in the list of distinct keys, so keys
  // themselves are rarely compared; 0 when empty. Roomy from the start: growing costs more.
  if (n >= UINT32_MAX) throw std::invalid_argument("a batch of 2^32 keys or more");
  const size_t capacity = std::bit_ceil(std::max<size_t>(n + n / 2, 16));
  const uint64_t mask = capacity - 1;
  const int shift = 64 - std::countr_zero(capacity);
  std::vector<uint64_t> slots(capacity, 0);
  auto hashes = std::make_unique_for_overwrite<uint64_t[]>(n);
  for (size_t i = 0; i < n; ++i) hashes[i] = Mix(LoadKey(keys, i));
  auto distinct = std::make_unique_for_overwrite<uint64_t[]>(n);
  auto inverse = std::make_unique_for_overwrite<int64_t[]>(n);
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(&slots[hashes[i + kAhead] >> shift]);
    const uint64_t key = LoadKey(keys, i);
    const uint64_t half = hashes[i] << 32;  // the other half is the slot's number
    for (size_t s = hashes[i] >> shift;; s = (s + 1) & mask) {
      if (slots[s] == 0) {
        distinct[count] = key;
        inverse[i] = count;
        slots[s] = half | ++count;
        break;
      }
      if ((slots[s] ^ half) >> 32 != 0) continue;
      const uint32_t found = static_cast<uint32_t>(slots[s]) - 1;
      if (distinct[found] == key) {
        inverse[i] = found;
        break;
      }
    }
  }
  *out = {std::move(distinct), count, std::move(inverse)};
}

std::vector<Part> Partition(const void* keys, size_t n, const uint16_t* route, uint32_t shards) {
  std::vector<Part> parts(shards);
  std::vector<size_t> counts(shards, 0);
  for (size_t i = 0; i < n; ++i) ++counts[route[BucketOf(Mix(LoadKey(keys, i)))]];
  for (uint32_t s = 0; s < shards; ++s) {
    parts[s].keys.reserve(counts[s]);
    parts[s].positions.reserve(counts[s]);
  }
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = LoadKey(keys, i);
    Part& part = parts[route[BucketOf(Mix(key))]];
    part.keys.push_back(key);
    part.positions.push_back(static_cast<int64_t>(i));
  }
  return parts;
}

void CopyRows(const void* const* rows, const int64_t* inverse, size_t n, size_t dim, Dtype from,
              float* to) {
  auto row = [&](size_t i) { return inverse ? rows[inverse[i]] : rows[i]; };
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(row(i + kAhead));
    if (from == Dtype::kFloat32) {
      std::memcpy(to + i * dim, row(i), dim * sizeof(float));
    } else {
      Decode(from, row(i), dim, to + i * dim);
    }
  }
}

void CopyKeys(const void* keys, size_t n, size_t key_bytes, void* to) {
  if (key_bytes == 8) {
    std::memcpy(to, keys, 8 * n);
    return;
  }
  auto* out = static_cast<char*>(to);
  for (size_t i = 0; i < n; ++i) {
    const auto key = static_cast<uint32_t>(LoadKey(keys, i));
    std::memcpy(out + 4 * i, &key, 4);
  }
}

HETERPS_CLONES
void SegmentSum(const int64_t* inverse, const void* grads, size_t n, size_t dim, float* sums) {
  const UnalignedFloat* values = static_cast<const UnalignedFloat*>(grads);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(sums + static_cast<size_t>(inverse[i + kAhead]) * dim);
    float* __restrict sum = sums + static_cast<size_t>(inverse[i]) * dim;
    const UnalignedFloat* __restrict g = values + i * dim;
    for (size_t j = 0; j < dim; ++j) sum[j] += g[j];
  }
}

}  // namespace heterps::ps
