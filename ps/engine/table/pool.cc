#include "table/pool.h"

#include <cstring>
#include <stdexcept>

#include "table/heat.h"

namespace heterps::ps {
namespace {
constexpr uint32_t kNoSlot = UINT32_MAX;
constexpr uint32_t kMaxRows = 1u << 30;  // two bits of a place say which pool it is in
}  // namespace

Pool::Pool(Arena& arena, size_t row_bytes, bool with_usage, bool with_heat)
    : arena_(arena),
      row_bytes_(row_bytes),
      with_usage_(with_usage),
      with_heat_(with_heat),
      free_(kNoSlot) {
  head_bytes_ = sizeof(uint32_t) + sizeof(uint64_t) + (with_usage_ ? sizeof(Usage) : 0);
  record_bytes_ = head_bytes_ + row_bytes_;
  per_row_ = record_bytes_ + (with_heat_ ? 1 : 0);
}

uint32_t Pool::Add(uint64_t key, uint32_t generation) {
  uint32_t slot = free_;
  if (slot != kNoSlot) {
    const uint64_t next = this->key(slot);
    free_ = static_cast<uint32_t>(next);
  } else {
    if (end_ >= kMaxRows) throw std::runtime_error("a sub-table cannot hold more than 2^30 rows");
    slot = end_;
    const Slot at = Find(slot);
    if (at.slab == slabs_.size()) {
      slabs_.push_back(static_cast<char*>(arena_.Allocate(at.rows * per_row_)));
    }
    ++end_;
  }
  set_key(slot, key);
  this->generation(slot) = generation;
  if (with_usage_) usage(slot) = Usage{};
  if (with_heat_) heat(slot) = 0;
  ++size_;
  return slot;
}

void Pool::Remove(uint32_t slot) {
  generation(slot) = 0;
  if (with_heat_) heat(slot) = Heat::kNone;
  set_key(slot, free_);
  free_ = slot;
  --size_;
}

void Pool::Move(uint32_t from, uint32_t to) {
  std::memcpy(head(to), head(from), record_bytes_);
  if (with_heat_) heat(to) = heat(from);
  generation(from) = 0;
}

void Pool::Truncate() {
  end_ = static_cast<uint32_t>(size_);
  free_ = kNoSlot;
  const size_t kept = end_ ? Find(end_ - 1).slab + 1 : 0;
  while (slabs_.size() > kept) {
    const size_t k = slabs_.size() - 1;
    const uint64_t rows = k < kMostBits - kFirstBits ? uint64_t{kFirst} << k : kMost;
    arena_.Free(slabs_.back(), rows * per_row_);
    slabs_.pop_back();
  }
}

}  // namespace heterps::ps
