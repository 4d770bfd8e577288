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

// Finds them, some keys after the others.
template <typename Index>
class DistinctKeys {
 public:
  // Of at most `n` keys in all; `distinct` and `inverse` have room for as many.
  DistinctKeys(size_t n, uint64_t* distinct, Index* inverse)
      : distinct_(distinct), inverse_(inverse) {
    // A slot is 1 + the key's position in the list of distinct ones, 0 when empty, and above it as
    // much of the hash as fits, so keys themselves are rarely compared. Roomy from the start:
    // growing costs more.
    if (n >= UINT32_MAX) throw std::invalid_argument("a batch of 2^32 keys or more");
    const size_t capacity = std::bit_ceil(std::max<size_t>(n + n / 2, 16));
    mask_ = capacity - 1;
    shift_ = 64 - std::countr_zero(capacity);
    positions_ = static_cast<uint32_t>(std::bit_ceil(n + 1) - 1);
    slots_.resize(capacity, 0);
  }

  // Takes keys[begin] to keys[end - 1]: writes those that are new behind the distinct ones, and
  // for each which of them it is. `fresh(u, hash)` is told of the u-th distinct key as it is found.
  template <typename Fresh>
  void Add(const void* keys, size_t begin, size_t end, const Fresh& fresh) {
    constexpr size_t kAhead = 16;  // a power of two
    std::array<uint64_t, kAhead> hashes{};
    for (size_t step = begin; step < end + kAhead; ++step) {
      const size_t i = step - kAhead;  // used where it is not below `begin`
      const uint64_t hash = hashes[step % kAhead];
      if (step < end) {
        const uint64_t ahead = hashes[step % kAhead] = Mix(LoadKey(keys, step));
        Prefetch(&slots_[ahead >> shift_]);
      }
      if (step < begin + kAhead) continue;
      const uint64_t key = LoadKey(keys, i);
      // Its low bits: the high ones are the slot's number.
      const uint32_t tag = static_cast<uint32_t>(hash) & ~positions_;
      for (size_t s = hash >> shift_;; s = (s + 1) & mask_) {
        const uint32_t slot = slots_[s];
        if (slot == 0) {
          fresh(count_, hash);
          distinct_[count_] = key;
          inverse_[i] = static_cast<Index>(count_);
          slots_[s] = tag | ++count_;
          break;
        }
        if (((slot ^ tag) & ~positions_) != 0) continue;
        const uint32_t at = (slot & positions_) - 1;
        if (distinct_[at] == key) {
          inverse_[i] = static_cast<Index>(at);
          break;
        }
      }
    }
  }

  uint32_t count() const { return count_; }

 private:
  uint64_t* distinct_;
  Index* inverse_;
  uint64_t mask_;
  int shift_;
  uint32_t positions_;
  uint32_t count_ = 0;
  std::vector<uint32_t> slots_;
};

// Those of `n` keys at once; how many there are.
template <typename Index, typename Fresh>
uint32_t FindDistinct(const void* keys, size_t n, uint64_t* distinct, Index* inverse,
                      const Fresh& fresh) {
  DistinctKeys<Index> found(n, distinct, inverse);
  found.Add(keys, 0, n, fresh);
  return found.count();
}

}  // namespace heterps::ps
