// Rows as they were at a cut, while training goes on.
#include <algorithm>
#include <cstring>

#include "table/subtable.h"

namespace heterps::ps {
namespace {

constexpr size_t kBlockBytes = 1 << 20;
constexpr uint32_t kScanned = 4096;  // slots looked at before the lock is given back

}  // namespace

void Subtable::BeginSnapshot(const Selection* selection, uint32_t cut) {
  snapshot_ = selection;
  generation_ = cut;
  cursor_kind_ = cursor_slot_ = 0;
  for (auto& writer : before_) writer.reset();
  ready_.clear();
  const bool whole = !selection->values;
  if (selection->since > 0) {
    BlockWriter gone(BlockKind::kGone, false, sizeof(uint64_t));
    for (const auto& [key, generation] : gone_) {
      if (generation < selection->since || !selection->Takes(Mix(key))) continue;
      std::memcpy(gone.Add(), &key, sizeof(key));
    }
    if (gone.count()) ready_.push_back(gone.Finish());
  }
  if (whole && !bloom_.counters().empty()) {
    BlockWriter bloom(BlockKind::kBloom, false, bloom_.counters().size());
    bloom.set_subtable(number_);
    std::memcpy(bloom.Add(), bloom_.counters().data(), bloom_.counters().size());
    ready_.push_back(bloom.Finish());
  }
}

void Subtable::EndSnapshot() {
  snapshot_ = nullptr;
  for (auto& writer : before_) writer.reset();
  ready_.clear();
}

bool Subtable::Wanted(uint64_t key, uint32_t generation, float score) const {
  return generation >= snapshot_->since && generation < generation_ && snapshot_->Takes(Mix(key)) &&
         (snapshot_->min_score <= 0 || score >= static_cast<float>(snapshot_->min_score));
}

bool Subtable::Written(uint32_t place) const {
  const uint32_t kind = KindOf(place);
  return kind < cursor_kind_ || (kind == cursor_kind_ && SlotOf(place) < cursor_slot_);
}

// Adds one record to `writer`, which becomes ready when it is large.
void Subtable::Put(BlockKind kind, uint64_t key, const Usage& usage, const char* row,
                   std::optional<BlockWriter>* writer) const {
  const bool values = snapshot_->values;
  const bool with_usage = !values && (usage_ || kind == BlockKind::kCounted);
  const size_t body = kind == BlockKind::kCounted ? 0 : layout_.bytes(kind == BlockKind::kFull);
  if (!*writer) {
    if (values) {
      writer->emplace(BlockKind::kValues, false, 8 + layout_.dim() * sizeof(float));
    } else {
      writer->emplace(kind, with_usage, 8 + (with_usage ? sizeof(Usage) : 0) + body);
    }
  }
  char* to = (*writer)->Add();
  std::memcpy(to, &key, sizeof(key));
  to += sizeof(key);
  if (values) {
    layout_.Read(row, kind == BlockKind::kFull, to);
    return;
  }
  if (with_usage) {
    std::memcpy(to, &usage, sizeof(usage));
    to += sizeof(usage);
  }
  if (body) std::memcpy(to, row, body);
}

void Subtable::SaveBefore(uint32_t place) {
  if (!snapshot_ || Written(place)) return;
  const uint32_t kind = KindOf(place);
  uint64_t key;
  Usage usage;
  const char* row = nullptr;
  uint32_t generation;
  auto as = static_cast<BlockKind>(kind);
  std::vector<char> copy;
  if (kind == kDisk) {
    copy.resize(disk_.record_bytes());
    ReadSlot(SlotOf(place), copy.data());
    const Record record = Take(copy.data());
    key = record.key, usage = record.usage, row = record.row, generation = record.generation;
    as = record.full ? BlockKind::kFull : BlockKind::kNarrow;
  } else {
    Pool& rows = pool(place);
    const uint32_t slot = SlotOf(place);
    key = rows.key(slot), generation = rows.generation(slot);
    if (usage_ || kind == kCounted) usage = rows.usage(slot);
    row = rows.row(slot);
  }
  if (snapshot_->values && kind == kCounted) return;
  if (!Wanted(key, generation, options_.ScoreOf(usage))) return;
  auto& writer = before_[static_cast<size_t>(as)];
  Put(as, key, usage, row, &writer);
  if (writer->size() >= kBlockBytes) {
    ready_.push_back(writer->Finish());
    writer.reset();
  }
}

void Subtable::ScanPool(uint32_t kind, std::optional<BlockWriter>* writer) {
  Pool& rows = pools_[kind];
  const uint32_t end = std::min(rows.end(), cursor_slot_ + kScanned);
  for (; cursor_slot_ < end; ++cursor_slot_) {
    const uint32_t slot = cursor_slot_;
    const uint32_t generation = rows.generation(slot);
    if (generation == 0) continue;
    const Usage usage = usage_ || kind == kCounted ? rows.usage(slot) : Usage{};
    if (!Wanted(rows.key(slot), generation, options_.ScoreOf(usage))) continue;
    Put(static_cast<BlockKind>(kind), rows.key(slot), usage, rows.row(slot), writer);
  }
  if (cursor_slot_ >= rows.end()) ++cursor_kind_, cursor_slot_ = 0;
}

void Subtable::ScanDisk(std::optional<BlockWriter>* narrow, std::optional<BlockWriter>* full) {
  const uint32_t first = cursor_slot_;
  const uint32_t count =
      std::min(DiskRows::Together(first), disk_.end() - std::min(first, disk_.end()));
  if (count > 0) {
    std::vector<char> records(count * disk_.record_bytes());
    disk_.ReadMany(first, count, records.data());
    for (uint32_t i = 0; i < count; ++i) {
      if (!disk_.used(first + i)) continue;
      const Record record = Take(&records[i * disk_.record_bytes()]);
      if (!Wanted(record.key, record.generation, options_.ScoreOf(record.usage))) continue;
      Put(record.full ? BlockKind::kFull : BlockKind::kNarrow, record.key, record.usage, record.row,
          record.full ? full : narrow);
    }
    cursor_slot_ += count;
  }
  if (cursor_slot_ >= disk_.end()) ++cursor_kind_, cursor_slot_ = 0;
}

std::vector<char> Subtable::NextBlock() {
  for (;;) {
    if (!ready_.empty()) {
      std::vector<char> block = std::move(ready_.front());
      ready_.pop_front();
      return block;
    }
    if (!snapshot_) return {};
    if (cursor_kind_ > kDisk) {  // all written: nothing needs to be copied aside any more
      for (auto& writer : before_) {
        if (writer) ready_.push_back(writer->Finish());
        writer.reset();
      }
      snapshot_ = nullptr;
      continue;
    }
    std::optional<BlockWriter> one, other;
    if (cursor_kind_ == kDisk) {
      ScanDisk(&one, &other);
    } else if (cursor_kind_ == kCounted && snapshot_->values) {
      ++cursor_kind_;
    } else {
      ScanPool(cursor_kind_, &one);
    }
    for (auto* writer : {&one, &other}) {
      if (*writer) ready_.push_back((*writer)->Finish());
    }
  }
}

}  // namespace heterps::ps
