// Rows of one size, with what is known of each: key, generation, use.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/platform.h"
#include "table/arena.h"

namespace heterps::ps {

// How often and how lately a key was pushed to.
struct Usage {
  float shows = 0;
  float clicks = 0;
  uint32_t count = 0;
  uint32_t time_s = 0;
  uint32_t step = 0;
};

// Not thread-safe. A slot and its address stay good until the row is moved or removed. The first
// slabs double in size, so that a table of ten rows is small; the others are alike, so that a
// large one has little unused.
class Pool {
 public:
  static constexpr uint32_t kMost = 512;  // rows of a slab

  Pool(Arena& arena, size_t row_bytes, bool with_usage, bool with_heat);

  uint32_t Add(uint64_t key, uint32_t generation);
  void Remove(uint32_t slot);
  // Moves a row to an unused slot. Truncate must follow before any Add.
  void Move(uint32_t from, uint32_t to);
  // Gives back the memory beyond the first size() slots, which must hold all rows.
  void Truncate();

  char* row(uint32_t slot) { return head(slot) + head_bytes_; }
  uint64_t key(uint32_t slot) {
    uint64_t key;
    std::memcpy(&key, head(slot) + sizeof(uint32_t), sizeof(key));
    return key;
  }
  // The cut after which the row last changed; 0 where there is no row.
  uint32_t& generation(uint32_t slot) { return *reinterpret_cast<uint32_t*>(head(slot)); }
  Usage& usage(uint32_t slot) {
    return *reinterpret_cast<Usage*>(head(slot) + sizeof(uint32_t) + sizeof(uint64_t));
  }
  // See table/heat.h.
  uint8_t& heat(uint32_t slot) {
    const Slot s = Find(slot);
    return *reinterpret_cast<uint8_t*>(slabs_[s.slab] + s.rows * record_bytes_ + s.row);
  }
  // Generation, key and usage, which a look-up reads; the row follows, since neighbouring lines
  // come faster than others.
  char* head(uint32_t slot) {
    const Slot s = Find(slot);
    return slabs_[s.slab] + s.row * record_bytes_;
  }

  size_t row_bytes() const { return row_bytes_; }
  size_t head_bytes() const { return head_bytes_; }
  uint32_t end() const { return end_; }  // all slots lie below
  size_t size() const { return size_; }
  size_t per_row() const { return per_row_; }  // bytes that a row takes
  size_t bytes() const { return end_ * per_row_; }
  size_t live_bytes() const { return size_ * per_row_; }

 private:
  static constexpr uint32_t kFirst = 32;  // rows of the first slab
  static constexpr int kFirstBits = std::bit_width(kFirst);
  static constexpr int kMostBits = std::bit_width(kMost);

  struct Slot {
    size_t slab;
    uint64_t row;   // within it
    uint64_t rows;  // of it
  };
  static Slot Find(uint32_t slot) {
    const uint64_t shifted = uint64_t{slot} + kFirst;
    if (shifted < kMost) {
      const int width = std::bit_width(shifted);
      const uint64_t rows = uint64_t{1} << (width - 1);
      return {static_cast<size_t>(width - kFirstBits), shifted - rows, rows};
    }
    return {kMostBits - kFirstBits - 1 + shifted / kMost, shifted % kMost, kMost};
  }
  void set_key(uint32_t slot, uint64_t key) {
    std::memcpy(head(slot) + sizeof(uint32_t), &key, sizeof(key));
  }

  Arena& arena_;
  size_t row_bytes_;
  bool with_usage_, with_heat_;
  size_t head_bytes_;
  size_t record_bytes_;  // of head and row
  size_t per_row_;       // and heat, which lies behind a slab's records
  uint32_t end_ = 0;
  uint32_t free_;  // first removed slot; the next is in its key
  size_t size_ = 0;
  std::vector<char*> slabs_;
};

}  // namespace heterps::ps
