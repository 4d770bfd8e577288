#include "table/reads.h"

#include <algorithm>

#include "table/hash.h"

namespace heterps::ps {

uint32_t* Fetched::Entry(uint32_t slot) {
  const size_t mask = places_.size() - 1;
  size_t at = Mix(slot) & mask;
  while (places_[at] && all_[places_[at] - 1].slot != slot) at = (at + 1) & mask;
  return &places_[at];
}

void Fetched::Add(uint32_t slot, uint32_t version, size_t size, uint64_t offset) {
  if (2 * all_.size() >= places_.size()) {
    places_.assign(std::max<size_t>(64, 2 * places_.size()), 0);
    for (size_t i = 0; i < all_.size(); ++i) *Entry(all_[i].slot) = static_cast<uint32_t>(i + 1);
  }
  uint32_t* entry = Entry(slot);
  if (*entry) return;
  all_.emplace_back(this, offset, size, slot, version);
  *entry = static_cast<uint32_t>(all_.size());
}

const char* Fetched::Find(uint32_t slot, uint32_t version) const {
  if (all_.empty()) return nullptr;
  const uint32_t at = *Entry(slot);
  if (at == 0) return nullptr;
  const One& one = all_[at - 1];
  return one.whole && one.version == version ? one.record : nullptr;
}

void Fetched::Begin() {
  size_t total = 0;
  for (const One& one : all_) total += SpanOf(one).size;
  if (total == 0) return;
  bytes_ = BlockOf(align_, total);
  char* to = bytes_.get();
  for (One& one : all_) {
    const Span span = SpanOf(one);
    one.record = to + (one.offset - span.begin);
    ++left_;
    ring_->Read(fd_, to, span.size, span.begin, &one);
    to += span.size;
  }
  ring_->Enter(0);
}

// Whatever the system answers, what was handed over is its own until it is done.
void Fetched::Wait() {
  while (left_ > 0) {
    if (!ring_->TakeDone()) ring_->Enter(static_cast<unsigned>(left_));
  }
}

void Fetched::One::Done(int read) {
  // What failed is read again by whoever needs it, who can say why.
  whole = read >= 0 && static_cast<uint64_t>(read) >= offset % of->align_ + size;
  --of->left_;
}

}  // namespace heterps::ps
