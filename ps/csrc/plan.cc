#include "plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <utility>

#include "hash.h"
#include "platform.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 16;        // a power of two
constexpr size_t kMostParts = 4096;  // more would not be written side by side well

}  // namespace

void MakePlan(const void* keys, size_t n, const uint16_t* route, uint32_t shards, Plan* out) {
  // A slot is 1 + the key's position in the list of distinct ones, 0 when empty, and above it as
  // much of the hash as fits, so keys themselves are rarely compared. Roomy from the start:
  // growing costs more.
  if (n >= UINT32_MAX) throw std::invalid_argument("a batch of 2^32 keys or more");
  const size_t capacity = std::bit_ceil(std::max<size_t>(n + n / 2, 16));
  const uint64_t mask = capacity - 1;
  const int shift = 64 - std::countr_zero(capacity);
  const uint32_t positions = static_cast<uint32_t>(std::bit_ceil(n + 1) - 1);
  const size_t within = std::max<size_t>(std::min<size_t>(kSubtables, kMostParts / shards), 1);
  std::vector<uint32_t> slots(capacity, 0);
  std::vector<uint32_t> next(within * shards + 1, 0);  // first the counts, one further on
  auto distinct = std::make_unique_for_overwrite<uint64_t[]>(n);
  auto part_of = std::make_unique_for_overwrite<uint16_t[]>(n);  // distinct keys
  auto found = std::make_unique_for_overwrite<uint32_t[]>(n);
  std::array<uint64_t, kAhead> hashes;
  uint32_t count = 0;
  for (size_t step = 0; step < n + kAhead; ++step) {
    const size_t i = step - kAhead;  // used where it is not below zero
    const uint64_t hash = hashes[step % kAhead];
    if (step < n) {
      const uint64_t ahead = hashes[step % kAhead] = Mix(LoadKey(keys, step));
      Prefetch(&slots[ahead >> shift]);
    }
    if (step < kAhead) continue;
    const uint64_t key = LoadKey(keys, i);
    // Its low bits: the high ones are the slot's number.
    const uint32_t tag = static_cast<uint32_t>(hash) & ~positions;
    for (size_t s = hash >> shift;; s = (s + 1) & mask) {
      const uint32_t slot = slots[s];
      if (slot == 0) {
        const size_t part = route[BucketOf(hash)] * within + SubtableOf(hash) * within / kSubtables;
        ++next[part + 1];
        part_of[count] = static_cast<uint16_t>(part);
        distinct[count] = key;
        found[i] = count;
        slots[s] = tag | ++count;
        break;
      }
      if (((slot ^ tag) & ~positions) != 0) continue;
      const uint32_t at = (slot & positions) - 1;
      if (distinct[at] == key) {
        found[i] = at;
        break;
      }
    }
  }
  for (size_t p = 1; p < next.size(); ++p) next[p] += next[p - 1];
  out->count = count;
  out->begin.clear();
  for (size_t s = 0; s <= shards; ++s) out->begin.push_back(next[s * within]);
  out->keys = std::make_unique_for_overwrite<uint64_t[]>(count);
  auto place = std::make_unique_for_overwrite<uint32_t[]>(count);
  for (uint32_t u = 0; u < count; ++u) {
    place[u] = next[part_of[u]]++;
    out->keys[place[u]] = distinct[u];
  }
  out->inverse = std::make_unique_for_overwrite<int64_t[]>(n);
  for (size_t i = 0; i < n; ++i) out->inverse[i] = place[found[i]];
}

}  // namespace heterps::ps
