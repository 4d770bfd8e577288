// A batch of keys made ready for the shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace heterps::ps {

// Each key once, by shard and then by sub-table, which is the order that a shard looks them up in:
// so the rows of a message are read and written one after the other.
struct Plan {
  std::unique_ptr<uint64_t[]> keys;
  size_t count = 0;                    // of them
  std::vector<size_t> begin;           // of each shard's keys, and the end
  std::unique_ptr<int64_t[]> inverse;  // keys[inverse[i]] is the i-th key given
};

// `route[bucket]` is the bucket's shard.
void MakePlan(const void* keys, size_t n, const uint16_t* route, uint32_t shards, Plan* out);

}  // namespace heterps::ps
