// A batch whose keys are sent, and whose rows come, piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "batch/distinct.h"

namespace heterps::ps {

// Each key is asked for once, in the piece in which it first occurs. A piece's rows come by shard.
class Pieces {
 public:
  // Keeps `keys` [n] and `route`, a shard for each bucket.
  Pieces(const void* keys, size_t n, const uint16_t* route, uint32_t shards);

  // Goes on to the key at `end`: the keys that are asked for now, by shard.
  std::vector<std::vector<uint64_t>> Next(size_t end);

  // How many rows at the beginning lie as the caller's keys do.
  size_t straight() const { return straight_; }
  // Rows of all pieces until now.
  size_t asked() const { return found_.count(); }
  size_t size() const { return n_; }

  // Copies rows [asked, dim] to where the caller's keys from `begin` to `end` are; pieces until
  // `end` have come. The straight ones have been written to `out` and to nowhere else.
  void Spread(size_t begin, size_t end, const float* rows, size_t dim, float* out,
              bool parallel) const;

 private:
  const void* keys_;
  size_t n_;
  const uint16_t* route_;
  uint32_t shards_;
  std::unique_ptr<uint64_t[]> distinct_;
  std::unique_ptr<uint32_t[]> inverse_;  // for each key which row it has
  std::unique_ptr<uint32_t[]> place_;    // of distinct keys, where there are several shards
  DistinctKeys<uint32_t> found_;
  size_t next_ = 0;
  size_t straight_ = 0;
};

}  // namespace heterps::ps
