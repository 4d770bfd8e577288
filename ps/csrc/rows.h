// The rows of one sub-table: an open-addressing index over rows that lie in slabs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hash.h"
#include "platform.h"

namespace heterps::ps {

// Not thread-safe; its sub-table's mutex guards it. Rows never move, so a row number or address
// stays good while the index grows.
class Rows {
 public:
  static constexpr uint32_t kMissing = UINT32_MAX;

  // `max_load` is the fill at which the index doubles. Sub-tables get different ones, so that
  // they do not all grow within the same batch.
  Rows(size_t width, double max_load);

  struct Found {
    uint32_t row;
    bool created;
    bool repeated;  // already found with this stamp
  };

  // A stamp marks the keys seen in one batch. It is never zero.
  uint32_t NextStamp();
  Found FindOrCreate(uint64_t key, uint64_t hash, uint32_t stamp);
  uint32_t Find(uint64_t key, uint64_t hash) const;
  void PrefetchIndex(uint64_t hash) const { Prefetch(&entries_[PlaceOf(hash) & mask_]); }

  float* at(uint32_t row) {
    return slabs_[row >> slab_shift_].get() + (row & slab_mask_) * stride_;
  }
  const float* at(uint32_t row) const { return const_cast<Rows*>(this)->at(row); }
  size_t size() const { return size_; }
  size_t bytes() const;

  // Calls visit(key, row address) for every row, in index order.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Entry& entry : entries_) {
      if (entry.row != kMissing) visit(entry.key, at(entry.row));
    }
  }

 private:
  // Emptiness is in `row`, so every key value is legal. 16 bytes: four to a cache line.
  struct Entry {
    uint64_t key = 0;
    uint32_t row = kMissing;
    uint32_t stamp = 0;
  };
  struct Free {
    void operator()(float* p) const;
  };

  void Grow();
  void AddSlab();

  size_t stride_;  // floats from one row to the next, a multiple of 4
  double max_load_;
  uint32_t slab_shift_;
  uint32_t slab_mask_;
  size_t size_ = 0;
  size_t limit_ = 0;  // size at which the index grows
  uint64_t mask_ = 0;
  uint32_t stamp_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::unique_ptr<float, Free>> slabs_;
};

}  // namespace heterps::ps
