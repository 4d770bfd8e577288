// What a client does to a batch of keys and rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "row/half.h"

namespace heterps::ps {

struct Unique {
  std::unique_ptr<uint64_t[]> keys;    // distinct, in order of first occurrence
  size_t count = 0;                    // of them
  std::unique_ptr<int64_t[]> inverse;  // keys[inverse[i]] is the i-th key given
};
void FindUnique(const void* keys, size_t n, Unique* out);

struct Part {
  std::vector<uint64_t> keys;
  std::vector<int64_t> positions;  // of those keys in the batch, ascending
};
// `route[bucket]` is the bucket's shard.
std::vector<Part> Partition(const void* keys, size_t n, const uint16_t* route, uint32_t shards);

// Rows that lie one after the other, and which of all the distinct rows they are.
struct RowPart {
  const char* rows;
  size_t count;
  const int64_t* positions;  // null: those that follow on the part before
};

// Decodes `n` rows of `dim` values each: row i is row inverse[i] (or i, where that is null) of the
// parts, which must cover all the distinct rows. Indices must have been checked.
void CopyRows(const std::vector<RowPart>& parts, size_t distinct, const int64_t* inverse, size_t n,
              size_t dim, Dtype from, float* to);

// Keys as `key_bytes` (4 or 8) bytes each; those cut to 4 must fit.
void CopyKeys(const void* keys, size_t n, size_t key_bytes, void* to);

// sums[s] is the sum of those grads[i] for which inverse[i] is s, added in order of i.
void SegmentSum(const int64_t* inverse, const void* grads, size_t n, size_t segments, size_t dim,
                float* sums);

}  // namespace heterps::ps
