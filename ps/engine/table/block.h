// Rows on their way to a file or another shard. All integers are little-endian.
//
// A block:
//   offset  size  field
//        0     4  magic "HPB2"
//        4     1  kind, see BlockKind
//        5     1  1 when a Usage precedes every row
//        6     2  sub-table (bloom)
//        8     4  count of records
//       12     4  bytes a record
//       16     -  the records
// A record of rows: key (uint64), [usage: shows, clicks (float32), count, time, step (uint32)],
// the row as it lies in memory (layout.h). Of values: key, dim float32. Of the gone: key.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "table/hash.h"

namespace heterps::ps {

enum class BlockKind : uint8_t {
  kCounted = 0,
  kNarrow = 1,
  kFull = 2,
  kGone = 3,
  kValues = 4,
  kBloom = 5
};

struct BlockHeader {
  char magic[4];
  uint8_t kind;
  uint8_t usage;
  uint16_t subtable;
  uint32_t count;
  uint32_t record_bytes;
};
static_assert(sizeof(BlockHeader) == 16);

inline constexpr char kBlockMagic[4] = {'H', 'P', 'B', '2'};

using Buckets = std::bitset<kBuckets>;

// What a snapshot takes.
struct Selection {
  uint32_t since = 0;    // only rows changed after that cut; 0: all
  bool values = false;   // weights as float32 instead of whole rows
  double min_score = 0;  // values: only rows of that score
  bool all_buckets = true;
  Buckets buckets;

  bool Takes(uint64_t hash) const { return all_buckets || buckets[BucketOf(hash)]; }
};

// One block being filled.
class BlockWriter {
 public:
  BlockWriter(BlockKind kind, bool usage, size_t record_bytes) {
    header_ = {{}, static_cast<uint8_t>(kind),         static_cast<uint8_t>(usage), 0,
               0,  static_cast<uint32_t>(record_bytes)};
    std::memcpy(header_.magic, kBlockMagic, sizeof(kBlockMagic));
    bytes_.resize(sizeof(header_));
  }
  // Room for one more record.
  char* Add() {
    const size_t at = bytes_.size();
    bytes_.resize(at + header_.record_bytes);
    ++header_.count;
    return bytes_.data() + at;
  }
  void set_subtable(size_t s) { header_.subtable = static_cast<uint16_t>(s); }
  uint32_t count() const { return header_.count; }
  size_t size() const { return bytes_.size(); }
  std::vector<char> Finish() {
    std::memcpy(bytes_.data(), &header_, sizeof(header_));
    return std::move(bytes_);
  }

 private:
  BlockHeader header_;
  std::vector<char> bytes_;
};

}  // namespace heterps::ps
