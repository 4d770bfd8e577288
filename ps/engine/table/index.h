// Where each key's row is: one cache line holds twelve entries.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "bindings/platform.h"
#include "table/arena.h"
#include "table/hash.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace heterps::ps {

// An entry is 8 bits of the hash and a 32-bit place; keys are compared where the rows are. Of a
// place two bits say where, and 30 are a slot; as long as slots are small, eight of these have more
// of the hash, since keys on disk are compared by a read. A full bucket sends entries on to the
// next and counts them, so a search knows where to end and an erased entry leaves no grave (as in
// Folly's F14). Not thread-safe.
class Index {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Grows to `growth` times as many buckets once `max_load` of its slots are taken.
  Index(Arena& arena, double max_load, double growth);

  size_t size() const { return size_; }
  size_t bytes() const { return count_ * sizeof(Bucket); }
  bool full() const { return size_ >= limit_; }

  void PrefetchBucket(uint64_t hash) const { Prefetch(&buckets_[HomeOf(hash)]); }

  // The first place in the home bucket that may be the hash's: to prefetch its row.
  uint32_t Candidate(uint64_t hash) const {
    const Bucket& bucket = buckets_[HomeOf(hash)];
    const uint32_t matches = Matches(bucket, TagOf(hash));
    return matches ? bucket.entries[__builtin_ctz(matches)] & ~more_ : kNone;
  }

  // The place for which same(place) holds, or kNone.
  template <typename Same>
  uint32_t Find(uint64_t hash, Same same) const {
    const uint32_t* entry = const_cast<Index*>(this)->FindEntry(hash, same);
    return entry ? *entry & ~more_ : kNone;
  }

  // The hash must have no entry yet, and the index not be full().
  void Insert(uint64_t hash, uint32_t place);
  // The entry must be there.
  void Replace(uint64_t hash, uint32_t from, uint32_t to);
  // The entry must be there.
  void Erase(uint64_t hash, uint32_t place);
  // Empties it and makes room for more; the owner inserts all anew.
  void Grow();

 private:
  static constexpr uint32_t kSlots = 12;
  static constexpr uint32_t kAll = (1u << kSlots) - 1;
  static constexpr uint32_t kMoreAt = 22;  // of an entry
  struct alignas(64) Bucket {
    std::array<uint8_t, kSlots> tags{};  // 0: empty
    std::array<uint32_t, kSlots> entries{};
    uint32_t passed = 0;  // entries that found this bucket full
  };
  static_assert(sizeof(Bucket) == 64);

  // By 32 bits of the hash that are not the tag's, so there may be any number of buckets.
  uint64_t HomeOf(uint64_t hash) const {
    return (uint64_t{static_cast<uint32_t>(PlaceOf(hash))} * count_) >> 32;
  }
  uint64_t After(uint64_t bucket) const { return bucket + 1 == count_ ? 0 : bucket + 1; }
  static uint8_t TagOf(uint64_t hash) {
    const auto tag = static_cast<uint8_t>(hash >> 56);
    return tag ? tag : 1;
  }
  uint32_t MoreOf(uint64_t hash) const {
    return (static_cast<uint32_t>(hash >> 48 & 0xFF) << kMoreAt) & more_;
  }
  static uint32_t Matches(const Bucket& bucket, uint8_t tag) {
#if defined(__SSE2__)
    const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(&bucket));
    const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(tags, wanted))) & kAll;
#else
    uint32_t matches = 0;
    for (uint32_t i = 0; i < kSlots; ++i) matches |= uint32_t{bucket.tags[i] == tag} << i;
    return matches;
#endif
  }
  template <typename Same>
  uint32_t* FindEntry(uint64_t hash, Same same) {
    const uint8_t tag = TagOf(hash);
    const uint32_t more = MoreOf(hash);
    // Of few buckets each may have sent entries on: no search looks into one twice.
    for (uint64_t b = HomeOf(hash), left = count_; left > 0; b = After(b), --left) {
      Bucket& bucket = buckets_[b];
      for (uint32_t m = Matches(bucket, tag); m; m &= m - 1) {
        uint32_t& entry = bucket.entries[__builtin_ctz(m)];
        if ((entry & more_) == more && same(entry & ~more_)) return &entry;
      }
      if (bucket.passed == 0) break;
    }
    return nullptr;
  }
  // Entries have less of the hash where the place needs those bits.
  void MakeRoomFor(uint32_t place);
  void Allocate(size_t buckets);

  Arena& arena_;
  double max_load_, growth_;
  uint64_t count_ = 0;  // of buckets
  size_t size_ = 0;
  size_t limit_ = 0;
  uint32_t more_ = 0xFFu << kMoreAt;  // bits of an entry that are the hash's
  Bucket* buckets_ = nullptr;
};

}  // namespace heterps::ps
