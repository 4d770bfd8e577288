#include "rows.h"

#include <algorithm>
#include <bit>
#include <new>
#include <stdexcept>

namespace heterps::ps {
namespace {
constexpr size_t kFirstIndex = 64;
constexpr size_t kSlabBytes = 256 << 10;
constexpr std::align_val_t kLine{64};
}  // namespace

void Rows::Free::operator()(float* p) const { ::operator delete(p, kLine); }

Rows::Rows(size_t width, double max_load)
    : stride_((width + 3) / 4 * 4), max_load_(max_load), entries_(kFirstIndex) {
  const size_t rows = std::bit_floor(std::max<size_t>(kSlabBytes / (stride_ * sizeof(float)), 1));
  slab_shift_ = static_cast<uint32_t>(std::countr_zero(rows));
  slab_mask_ = static_cast<uint32_t>(rows - 1);
  mask_ = kFirstIndex - 1;
  limit_ = static_cast<size_t>(kFirstIndex * max_load_);
}

uint32_t Rows::NextStamp() {
  if (++stamp_ == 0) {  // after 2^32 batches the old stamps would come back
    for (Entry& entry : entries_) entry.stamp = 0;
    stamp_ = 1;
  }
  return stamp_;
}

uint32_t Rows::Find(uint64_t key, uint64_t hash) const {
  for (uint64_t i = PlaceOf(hash) & mask_;; i = (i + 1) & mask_) {
    const Entry& entry = entries_[i];
    if (entry.row == kMissing || entry.key == key) return entry.row;
  }
}

Rows::Found Rows::FindOrCreate(uint64_t key, uint64_t hash, uint32_t stamp) {
  uint64_t i = PlaceOf(hash) & mask_;
  for (;; i = (i + 1) & mask_) {
    Entry& entry = entries_[i];
    if (entry.row == kMissing) break;
    if (entry.key == key) {
      const bool repeated = entry.stamp == stamp;
      entry.stamp = stamp;
      return {entry.row, false, repeated};
    }
  }
  if (size_ >= limit_) {
    Grow();
    i = PlaceOf(hash) & mask_;
    while (entries_[i].row != kMissing) i = (i + 1) & mask_;
  }
  if (size_ >= kMissing) throw std::runtime_error("a sub-table cannot hold more than 2^32 rows");
  const auto row = static_cast<uint32_t>(size_);
  if ((row & slab_mask_) == 0) AddSlab();
  entries_[i] = {key, row, stamp};
  ++size_;
  return {row, true, false};
}

// Only 16 bytes a row move; the rows themselves stay where they are.
void Rows::Grow() {
  std::vector<Entry> next(entries_.size() * 2);
  const uint64_t mask = next.size() - 1;
  for (const Entry& entry : entries_) {
    if (entry.row == kMissing) continue;
    uint64_t i = PlaceOf(Mix(entry.key)) & mask;
    while (next[i].row != kMissing) i = (i + 1) & mask;
    next[i] = entry;
  }
  entries_ = std::move(next);
  mask_ = mask;
  limit_ = static_cast<size_t>(static_cast<double>(entries_.size()) * max_load_);
}

void Rows::AddSlab() {
  const size_t bytes = (size_t{slab_mask_} + 1) * stride_ * sizeof(float);
  slabs_.reserve(slabs_.size() + 1);
  slabs_.emplace_back(static_cast<float*>(::operator new(bytes, kLine)));
}

size_t Rows::bytes() const {
  return entries_.size() * sizeof(Entry) +
         slabs_.size() * (size_t{slab_mask_} + 1) * stride_ * sizeof(float);
}

}  // namespace heterps::ps
