// One hash of a key decides everything: bits 0-9 its virtual bucket (and so its shard), bits
// 10-15 its sub-table, the rest its place in the index. Checkpoints depend on this; never change.
#pragma once

#include <cstdint>

namespace heterps::ps {

inline constexpr uint32_t kBuckets = 1024;
inline constexpr uint32_t kSubtables = 64;

// The finaliser of splitmix64: a bijection, so distinct keys have distinct hashes.
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

inline uint32_t BucketOf(uint64_t hash) { return hash & (kBuckets - 1); }
inline uint32_t ShardOf(uint64_t hash, uint32_t shards) {
  return static_cast<uint32_t>(uint64_t{BucketOf(hash)} * shards / kBuckets);
}
inline uint32_t SubtableOf(uint64_t hash) { return (hash >> 10) & (kSubtables - 1); }
inline uint64_t PlaceOf(uint64_t hash) { return hash >> 16; }

}  // namespace heterps::ps
