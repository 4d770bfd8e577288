#include "table/subtable.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>

namespace heterps::ps {

Subtable::Subtable(const Options& options, Arena& rows, Arena& indices, DiskFile& file, Duel& duel,
                   size_t number, double max_load, double growth)
    : options_(options),
      layout_(options.layout),
      usage_(options.usage()),
      counts_(usage_ || options.admission.kind == Admission::Kind::kBloom),
      number_(number),
      duel_(duel),
      index_(indices, max_load, growth),
      pools_{Pool(rows, 0, true, false), Pool(rows, layout_.bytes(false), usage_, options.tiered()),
             Pool(rows, layout_.bytes(true), usage_, options.tiered())},
      disk_(file, (usage_ ? sizeof(Usage) : 0) + layout_.bytes(true)),
      read_bytes_(EncodedBytes(layout_.dtype(), layout_.dim())),
      record_(disk_.record_bytes()) {
  if (options.admission.kind == Admission::Kind::kBloom) {
    bloom_ = Bloom(options.admission.capacity / kSubtables + 1, options.admission.false_positive);
  }
}

uint64_t Subtable::KeyAt(uint32_t place) {
  ReadSlot(SlotOf(place), record_.data());
  uint64_t key;
  std::memcpy(&key, record_.data(), sizeof(key));
  return key;
}

uint32_t Subtable::FindInMemory(uint64_t key, uint64_t hash) {
  return index_.Find(hash, [&](uint32_t place) {
    return KindOf(place) != kDisk && pool(place).key(SlotOf(place)) == key;
  });
}

// In memory first: what another key has on disk would have to be read to tell it from this one.
uint32_t Subtable::FindPlace(uint64_t key, uint64_t hash) {
  const uint32_t place = FindInMemory(key, hash);
  if (place != Index::kNone || disk_.size() == 0) return place;
  return index_.Find(hash,
                     [&](uint32_t other) { return KindOf(other) == kDisk && KeyAt(other) == key; });
}

// Five bytes a row are written anew; the rows stay where they are.
void Subtable::Grow() {
  index_.Grow();
  ForEachPlace([&](uint64_t key, uint32_t place) { index_.Insert(Mix(key), place); });
}

void Subtable::Insert(uint64_t key, uint64_t hash, uint32_t place) {
  if (index_.full()) {
    Grow();  // it finds the new row in its pool
    if (FindPlace(key, hash) != Index::kNone) return;
  }
  index_.Insert(hash, place);
}

uint32_t Subtable::Create(uint64_t key, uint64_t hash, bool full) {
  const uint32_t kind = full ? kFull : kNarrow;
  const uint32_t slot = pools_[kind].Add(key, generation_);
  layout_.Init(key, full, pools_[kind].row(slot));
  if (options_.tiered()) pools_[kind].heat(slot) = Heat::Arriving(0, 1);
  const uint32_t place = PlaceFor(kind, slot);
  Insert(key, hash, place);
  return place;
}

void Subtable::Count(Usage& usage, const Entry& entry, const PushBatch& batch) {
  usage.shows += entry.shows;
  usage.clicks += entry.clicks;
  usage.count += static_cast<uint32_t>(std::clamp(entry.shows, 1.0f, 1e6f));
  usage.time_s = batch.time_s;
  usage.step = batch.step;
}

bool Subtable::Admits(uint64_t hash, const Usage& usage, const PushBatch& batch) {
  const Admission& admission = options_.admission;
  switch (admission.kind) {
    case Admission::Kind::kAll:
      return true;
    case Admission::Kind::kCount:
      return usage.count >= admission.threshold;
    case Admission::Kind::kScore:
      return options_.score.of(usage) >= static_cast<float>(admission.threshold);
    case Admission::Kind::kBloom:
      return bloom_.Add(hash, usage.count) >= admission.threshold;
    case Admission::Kind::kProbability:
      return static_cast<double>(Mix(hash ^ batch.nonce) >> 11) * 0x1p-53 < admission.threshold;
  }
  return true;
}

uint32_t Subtable::Obtain(const Entry& entry, const Probed& probed, const PushBatch& batch) {
  const uint64_t key = entry.key, hash = probed.hash;
  uint32_t place = FindProbed(key, probed);
  if (place == Index::kNone || KindOf(place) == kCounted) {
    Usage usage;
    if (place != Index::kNone) {
      SaveBefore(place);
      usage = pool(place).usage(SlotOf(place));
    }
    Count(usage, entry, batch);
    // What is written outright needs no admission.
    if (batch.kind == PushBatch::Kind::kGradient && !Admits(hash, usage, batch)) {
      if (!options_.admission.exact()) return Index::kNone;
      if (place == Index::kNone) {
        place = PlaceFor(kCounted, pools_[kCounted].Add(key, generation_));
        Insert(key, hash, place);
      }
      pool(place).generation(SlotOf(place)) = generation_;
      pool(place).usage(SlotOf(place)) = usage;
      return Index::kNone;
    }
    if (place != Index::kNone) Remove(key, hash, place);
    place = Create(key, hash, !layout_.has_lazy());
    if (usage_) pool(place).usage(SlotOf(place)) = usage;
    return place;
  }
  if (KindOf(place) == kDisk) place = Promote(key, hash, place, 1);
  SaveBefore(place);
  Pool& rows = pool(place);
  const uint32_t slot = SlotOf(place);
  rows.generation(slot) = generation_;
  if (usage_) Count(rows.usage(slot), entry, batch);
  if (options_.tiered()) Heat::Use(rows.heat(slot));
  return place;
}

uint32_t Subtable::Widen(uint64_t key, uint64_t hash, uint32_t place) {
  Pool& narrow = pools_[kNarrow];
  Pool& full = pools_[kFull];
  const uint32_t from = SlotOf(place);
  const uint32_t to = full.Add(key, generation_);
  std::memcpy(full.row(to), narrow.row(from), layout_.bytes(false));
  layout_.Widen(key, full.row(to));
  full.usage(to) = narrow.usage(from);
  if (options_.tiered()) full.heat(to) = narrow.heat(from);
  index_.Replace(hash, place, PlaceFor(kFull, to));
  narrow.Remove(from);
  return PlaceFor(kFull, to);
}

void Subtable::Remove(uint64_t key, uint64_t hash, uint32_t place) {
  (void)key;
  index_.Erase(hash, place);
  if (KindOf(place) == kDisk) {
    disk_.Remove(SlotOf(place));
  } else {
    pool(place).Remove(SlotOf(place));
  }
}

Counters Subtable::counters() const {
  Counters out = counters_;
  out.disk_rows = disk_.size();
  out.rows = rows();
  out.waiting = pools_[kCounted].size();
  out.bytes = bytes();
  return out;
}

size_t Subtable::bytes() const {
  size_t total = index_.bytes() + bloom_.counters().size() + gone_.size() * sizeof(gone_[0]);
  for (const Pool& rows : pools_) total += rows.bytes();
  return total;
}

size_t Subtable::live_bytes() const {
  size_t total = index_.bytes() + bloom_.counters().size();
  for (const Pool& rows : pools_) total += rows.live_bytes();
  return total;
}

void Subtable::Keys(size_t limit, std::vector<uint64_t>* out) {
  for (const uint32_t kind : {kNarrow, kFull}) {
    Pool& rows = pools_[kind];
    for (uint32_t slot = 0; slot < rows.end() && out->size() < limit; ++slot) {
      if (rows.generation(slot) != 0) out->push_back(rows.key(slot));
    }
  }
  ForEachOnDisk([&](uint64_t key, uint32_t) {
    if (out->size() < limit) out->push_back(key);
    return out->size() < limit;
  });
}

void Subtable::Erase(const Buckets& buckets) {
  std::vector<std::pair<uint64_t, uint32_t>> found;
  ForEachPlace([&](uint64_t key, uint32_t place) {
    if (buckets[BucketOf(Mix(key))]) found.emplace_back(key, place);
  });
  for (const auto& [key, place] : found) Remove(key, Mix(key), place);
}

void Subtable::AbsorbGone(uint64_t key) {
  const uint32_t place = FindPlace(key, Mix(key));
  if (place == Index::kNone) return;
  SaveBefore(place);
  Remove(key, Mix(key), place);
}

void Subtable::AbsorbRow(BlockKind kind, uint64_t key, const Usage& usage, const char* row) {
  const uint64_t hash = Mix(key);
  AbsorbGone(key);
  const uint32_t into = static_cast<uint32_t>(kind);
  const uint32_t slot = pools_[into].Add(key, generation_);
  std::memcpy(pools_[into].row(slot), row, pools_[into].row_bytes());
  if (usage_ || kind == BlockKind::kCounted) pools_[into].usage(slot) = usage;
  Insert(key, hash, PlaceFor(into, slot));
  Relieve();
}

}  // namespace heterps::ps
