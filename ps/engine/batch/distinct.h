// The distinct keys of a batch, in the order in which they first occur.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/platform.h"
#include "table/hash.h"

namespace heterps::ps {

// Writes the distinct ones of `n` keys to `distinct` and, for each key, which of them it is to
// `inverse`; how many there are. `fresh(u, hash)` is told of the u-th distinct key as it is found.
template <typename Index, typename Fresh>
uint32_t FindDistinct(const void* keys, size_t n, uint64_t* distinct, Index* inverse,
                      const Fresh& fresh) {
  constexpr size_t kAhead = 16;  // a power of two
  // A slot is 1 + the key's position in the list of distinct ones, 0 when empty, and above it as
  // much of the hash as fits, so keys themselves are rarely compared. Roomy from the start:
  // growing costs more.
  if (n >= UINT32_MAX) throw std::invalid_argument("a batch of 2^32 keys or more");
  const size_t capacity = std::bit_ceil(std::max<size_t>(n + n / 2, 16));
  const uint64_t mask = capacity - 1;
  const int shift = 64 - std::countr_zero(capacity);
  const uint32_t positions = static_cast<uint32_t>(std::bit_ceil(n + 1) - 1);
  std::vector<uint32_t> slots(capacity, 0);
  std::array<uint64_t, kAhead> hashes{};
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
        fresh(count, hash);
        distinct[count] = key;
        inverse[i] = static_cast<Index>(count);
        slots[s] = tag | ++count;
        break;
      }
      if (((slot ^ tag) & ~positions) != 0) continue;
      const uint32_t at = (slot & positions) - 1;
      if (distinct[at] == key) {
        inverse[i] = static_cast<Index>(at);
        break;
      }
    }
  }
  return count;
}

}  // namespace heterps::ps
