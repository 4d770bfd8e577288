#include "table/index.h"

#include <algorithm>
#include <bit>
#include <new>

namespace heterps::ps {
namespace {
constexpr size_t kFirstBuckets = 2;
}

Index::Index(Arena& arena, double max_load, double growth)
    : arena_(arena), max_load_(max_load), growth_(growth) {
  Allocate(kFirstBuckets);
}

void Index::Allocate(size_t buckets) {
  if (buckets_) arena_.Free(buckets_, bytes());
  buckets_ = static_cast<Bucket*>(arena_.Allocate(buckets * sizeof(Bucket)));
  for (size_t b = 0; b < buckets; ++b) new (buckets_ + b) Bucket;
  count_ = buckets;
  size_ = 0;
  limit_ = static_cast<size_t>(static_cast<double>(buckets * kSlots) * max_load_);
}

void Index::Grow() {
  Allocate(
      std::max<size_t>(count_ + 1, static_cast<size_t>(static_cast<double>(count_) * growth_)));
}

void Index::MakeRoomFor(uint32_t place) {
  const uint32_t both = place & more_;
  if (both == 0) return;
  const uint32_t kept = more_ & ~0u << std::bit_width(both);  // above the place's highest bit
  for (uint64_t b = 0; b < count_; ++b) {
    for (uint32_t& entry : buckets_[b].entries) entry &= ~more_ | kept;
  }
  more_ = kept;
}

void Index::Insert(uint64_t hash, uint32_t place) {
  MakeRoomFor(place);
  for (uint64_t b = HomeOf(hash);; b = After(b)) {
    Bucket& bucket = buckets_[b];
    if (const uint32_t empty = Matches(bucket, 0)) {
      const int slot = __builtin_ctz(empty);
      bucket.tags[static_cast<size_t>(slot)] = TagOf(hash);
      bucket.entries[static_cast<size_t>(slot)] = place | MoreOf(hash);
      ++size_;
      return;
    }
    ++bucket.passed;
  }
}

void Index::Replace(uint64_t hash, uint32_t from, uint32_t to) {
  MakeRoomFor(to);
  *FindEntry(hash, [&](uint32_t place) { return place == from; }) = to | MoreOf(hash);
}

void Index::Erase(uint64_t hash, uint32_t place) {
  const uint8_t tag = TagOf(hash);
  const uint32_t entry = place | MoreOf(hash);
  for (uint64_t b = HomeOf(hash);; b = After(b)) {
    Bucket& bucket = buckets_[b];
    for (uint32_t m = Matches(bucket, tag); m; m &= m - 1) {
      const auto slot = static_cast<size_t>(__builtin_ctz(m));
      if (bucket.entries[slot] != entry) continue;
      bucket.tags[slot] = 0;
      --size_;
      return;
    }
    --bucket.passed;
  }
}

}  // namespace heterps::ps
