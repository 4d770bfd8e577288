// What a client does to a batch of keys and rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heterps::ps {

struct Unique {
  std::vector<uint64_t> keys;    // distinct, in order of first occurrence
  std::vector<int64_t> inverse;  // keys[inverse[i]] is the i-th key given
};
void FindUnique(const void* keys, size_t n, Unique* out);

struct Part {
  std::vector<uint64_t> keys;
  std::vector<int64_t> positions;  // of those keys in the batch, ascending
};
std::vector<Part> Partition(const void* keys, size_t n, uint32_t shards);

// Copies `n` rows of `bytes` each: to + i * bytes from rows[i], or from rows[inverse[i]].
void CopyRows(const void* const* rows, const int64_t* inverse, size_t n, size_t bytes, void* to);

// sums[inverse[i]] += grads[i], in order of i. `sums` must be zero before.
void SegmentSum(const int64_t* inverse, const void* grads, size_t n, size_t dim, float* sums);

}  // namespace heterps::ps
