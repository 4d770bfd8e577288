// Between memory and disk, and out of both.
#include <algorithm>
#include <cstring>

#include "table/subtable.h"

namespace heterps::ps {
namespace {

constexpr size_t kGoneKept = 1 << 16;  // removed keys remembered for deltas
constexpr double kHardLimit = 1.05;    // of the budget: from here on whoever adds rows makes room
constexpr double kRelieved = 0.1;      // of what the index leaves to rows, so much at once
constexpr double kSlack = 1.1;         // of the budget: more than that is not left to removed rows
constexpr unsigned kRounds = 8;        // of halving, after which nothing is left

}  // namespace

Subtable::Record Subtable::Take(char* record) const {
  DiskRows::Head head;
  std::memcpy(&head, record, sizeof(head));
  const auto missed = static_cast<uint8_t>(round_ - head.round);
  const auto heat = static_cast<uint8_t>(missed < kRounds ? head.heat >> missed : 0);
  Record out{head.key, head.generation, head.full != 0, heat, {}, record + sizeof(head)};
  if (usage_) {
    std::memcpy(&out.usage, out.row, sizeof(Usage));
    out.row += sizeof(Usage);
  }
  return out;
}

char* Subtable::AtHand(uint32_t slot) const {
  if (!extent_ || slot < extent_->first || slot - extent_->first >= extent_->count) return nullptr;
  return extent_->records + (slot - extent_->first) * disk_.record_bytes();
}

void Subtable::WriteSlot(uint32_t slot, const char* record) {
  std::memcpy(AtHand(slot), record, disk_.record_bytes());
  extent_->changed = true;
}

void Subtable::ReadSlot(uint32_t slot, char* record) {
  const size_t size = disk_.record_bytes();
  if (const char* here = AtHand(slot)) {
    std::memcpy(record, here, size);
  } else if (const char* read = fetched_ ? disk_.Find(slot, *fetched_) : nullptr) {
    std::memcpy(record, read, size);
  } else {
    disk_.Read(slot, record);
  }
}

Subtable::Record Subtable::ReadRecord(uint32_t slot) {
  ReadSlot(slot, record_.data());
  return Take(record_.data());
}

void Subtable::WriteRecord(char* to, const Record& record, const char* row) const {
  const DiskRows::Head head{record.key, record.generation & (~0u >> 1), record.full, record.heat,
                            round_};
  std::memcpy(to, &head, sizeof(head));
  to += sizeof(head);
  if (usage_) {
    std::memcpy(to, &record.usage, sizeof(record.usage));
    to += sizeof(record.usage);
  }
  if (row) std::memcpy(to, row, layout_.bytes(record.full));
}

uint32_t Subtable::Promote(uint64_t key, uint64_t hash, uint32_t place, uint8_t uses) {
  SaveBefore(place);
  const Record record = ReadRecord(SlotOf(place));
  const uint32_t kind = record.full ? kFull : kNarrow;
  Pool& rows = pools_[kind];
  const uint32_t slot = rows.Add(key, Moved(record.generation));
  std::memcpy(rows.row(slot), record.row, rows.row_bytes());
  rows.heat(slot) = Heat::Arriving(record.heat, uses);
  if (usage_) rows.usage(slot) = record.usage;
  index_.Replace(hash, place, PlaceFor(kind, slot));
  disk_.Remove(SlotOf(place));
  ++counters_.promoted;
  duel_.Missed(number_);
  return PlaceFor(kind, slot);
}

void Subtable::Relieve() {
  if (!options_.tiered()) return;
  const double most = kHardLimit * static_cast<double>(options_.memory_bytes) / kSubtables;
  if (static_cast<double>(live_bytes()) <= most) return;
  const double room = std::max(most - static_cast<double>(index_.bytes()), 0.0);
  Demote(static_cast<size_t>(most - kRelieved * room));
}

// A batch that has begun is finished in memory; the next one that makes rows is refused.
void Subtable::RelieveIfRoom() {
  try {
    Relieve();
  } catch (const DiskFull&) {
  }
}

Subtable::Coldest Subtable::ColdestOf(uint32_t kind, size_t rows) {
  std::array<size_t, Heat::kRanks> ranked{};
  size_t uses = 0;
  const auto each = [&](uint32_t of, auto visit) {
    Pool& pool = pools_[of];
    for (uint32_t slot = 0; slot < pool.end(); ++slot) {
      if (uint8_t& heat = pool.heat(slot); heat != Heat::kNone) visit(heat);
    }
  };
  each(kind, [&](uint8_t heat) {
    ++ranked[Heat::Rank(heat)];
    uses += Heat::Count(heat);
  });
  if (uses > duel_.Most(number_) * pools_[kind].size()) {
    for (const uint32_t of : {kNarrow, kFull}) {
      each(of, [](uint8_t& heat) { heat = Heat::Halved(heat); });
    }
    ++round_;
    return ColdestOf(kind, rows);
  }
  Coldest out{0, rows};
  while (out.rank + 1 < ranked.size() && out.equal > ranked[out.rank]) {
    out.equal -= ranked[out.rank++];
  }
  return out;
}

// The rows that are used least, of equals those that the hand comes to first. A row leaves memory
// once the disk has it.
void Subtable::Demote(size_t bytes) {
  const size_t used = live_bytes();
  if (!options_.tiered() || used <= bytes) return;
  const size_t size = disk_.record_bytes();
  std::vector<char> run;          // records of consecutive slots
  std::vector<uint32_t> leaving;  // where their rows are
  uint32_t first = 0, kind = kFull;
  const auto flush = [&] {
    if (leaving.empty()) return;
    disk_.WriteMany(first, static_cast<uint32_t>(leaving.size()), run.data());
    Pool& rows = pools_[kind];
    for (size_t i = 0; i < leaving.size(); ++i) {
      const uint64_t key = rows.key(leaving[i]);
      index_.Replace(Mix(key), PlaceFor(kind, leaving[i]),
                     PlaceFor(kDisk, first + static_cast<uint32_t>(i)));
      rows.Remove(leaving[i]);
      ++counters_.demoted;
    }
    run.clear();
    leaving.clear();
  };
  const auto leave = [&](uint32_t from) {
    if (!disk_.has_room(DiskRows::kFresh)) {
      flush();
      Tidy();
      disk_.MakeRoom(DiskRows::kFresh);
    }
    const uint32_t to = disk_.next(DiskRows::kFresh);
    const auto count = static_cast<uint32_t>(leaving.size());
    if (count && (to != first + count || DiskRows::Together(first) <= count)) flush();
    if (leaving.empty()) {
      first = to;
      const uint32_t most = DiskRows::Together(to);
      run.reserve(most * size), leaving.reserve(most);
    }
    // What is copied aside moves, so that no scan meets it again.
    SaveBefore(PlaceFor(kind, from));
    disk_.Take(DiskRows::kFresh);
    Pool& rows = pools_[kind];
    run.resize((leaving.size() + 1) * size);
    const Record record{rows.key(from),
                        Moved(rows.generation(from)),
                        kind == kFull,
                        static_cast<uint8_t>(Heat::Count(rows.heat(from))),
                        usage_ ? rows.usage(from) : Usage{},
                        nullptr};
    WriteRecord(&run[leaving.size() * size], record, rows.row(from));
    leaving.push_back(from);
  };
  size_t excess = used - bytes;
  try {
    for (kind = kFull;; kind = kNarrow) {
      Pool& rows = pools_[kind];
      const size_t wanted = std::min((excess + rows.per_row() - 1) / rows.per_row(), rows.size());
      Coldest coldest = ColdestOf(kind, wanted);
      uint32_t& hand = hands_[kind];
      for (size_t left = rows.end(), more = wanted; left > 0 && more > 0; --left) {
        if (hand >= rows.end()) hand = 0;
        const uint32_t from = hand++;
        uint8_t& heat = rows.heat(from);
        if (heat == Heat::kNone) continue;
        const unsigned rank = Heat::Rank(heat);
        if (rank > coldest.rank || (rank == coldest.rank && coldest.equal == 0)) {
          Heat::Wait(heat);
          continue;
        }
        if (rank == coldest.rank) --coldest.equal;
        leave(from);
        --more;
      }
      flush();
      excess -= std::min(excess, wanted * rows.per_row());
      if (kind == kNarrow) break;
    }
  } catch (...) {  // what has not been written is in memory, and nowhere else
    for (uint32_t i = 0; i < leaving.size(); ++i) disk_.Remove(first + i);
    throw;
  }
  if (static_cast<double>(this->bytes()) >
      kSlack * static_cast<double>(options_.memory_bytes) / kSubtables) {
    for (const uint32_t kind : {kCounted, kNarrow, kFull}) Compact(kind);
  }
}

void Subtable::Tidy() {
  while (const std::optional<uint32_t> first = disk_.Sparse(rows() - disk_.size())) {
    if (!Empty(*first)) return;
  }
}

bool Subtable::Empty(uint32_t first) {
  const size_t size = disk_.record_bytes();
  const uint32_t count = DiskRows::Together(first);
  std::vector<char> records(count * size);
  std::vector<std::pair<uint32_t, uint32_t>> moved;  // from, to: records of them, in order
  moved.reserve(count);
  disk_.ReadMany(first, count, records.data());
  bool all = true;
  try {
    for (uint32_t from = first; from < first + count; ++from) {
      if (!disk_.used(from)) continue;
      try {
        disk_.MakeRoom(DiskRows::kSettled);
      } catch (const DiskFull&) {
        all = false;
        break;
      }
      SaveBefore(PlaceFor(kDisk, from));
      char* record = &records[moved.size() * size];
      std::memmove(record, &records[(from - first) * size], size);
      DiskRows::Head head;
      std::memcpy(&head, record, sizeof(head));
      head.generation = Moved(head.generation);
      std::memcpy(record, &head, sizeof(head));
      moved.emplace_back(from, disk_.Take(DiskRows::kSettled));
    }
    for (size_t i = 0, run; i < moved.size(); i += run) {
      const uint32_t to = moved[i].second;
      const size_t most = std::min<size_t>(moved.size() - i, DiskRows::Together(to));
      for (run = 1; run < most && moved[i + run].second == to + run;) ++run;
      disk_.WriteMany(to, static_cast<uint32_t>(run), &records[i * size]);
    }
  } catch (...) {  // they are where they were
    for (const auto& [from, to] : moved) disk_.Remove(to);
    throw;
  }
  for (size_t i = 0; i < moved.size(); ++i) {
    uint64_t key;
    std::memcpy(&key, &records[i * size], sizeof(key));
    index_.Replace(Mix(key), PlaceFor(kDisk, moved[i].first), PlaceFor(kDisk, moved[i].second));
    disk_.Remove(moved[i].first);
  }
  counters_.tidied += moved.size();
  return all;
}

void Subtable::Compact(uint32_t kind) {
  Pool& rows = pools_[kind];
  uint32_t to = 0;
  for (uint32_t from = rows.end(); from-- > rows.size();) {
    if (rows.generation(from) == 0) continue;
    while (rows.generation(to) != 0) ++to;
    SaveBefore(PlaceFor(kind, from));
    rows.generation(from) = Moved(rows.generation(from));
    rows.Move(from, to);
    index_.Replace(Mix(rows.key(to)), PlaceFor(kind, from), PlaceFor(kind, to));
  }
  rows.Truncate();
}

void Subtable::Evict(uint64_t key, uint64_t hash, uint32_t place) {
  SaveBefore(place);
  Remove(key, hash, place);
  counters_.evicted += KindOf(place) != kCounted;
  gone_.emplace_back(key, generation_);
  if (gone_.size() > kGoneKept) {
    gone_from_ = gone_.front().second + 1;
    while (!gone_.empty() && gone_.front().second < gone_from_) gone_.pop_front();
  }
}

uint64_t Subtable::Shrink(uint32_t time_s, uint32_t step, bool decay, const Buckets* of) {
  const Eviction& rules = options_.eviction;
  std::vector<std::pair<uint64_t, uint32_t>> out;
  const bool decays = decay && options_.score.used() && options_.score.decay != 1;
  const auto look = [&](uint64_t key, uint32_t place) {
    if (of && !(*of)[BucketOf(Mix(key))]) return;
    if (decays) SaveBefore(place);
    Usage usage;
    const char* row = nullptr;
    bool full = KindOf(place) == kFull;
    if (KindOf(place) == kDisk) {
      const Record record = ReadRecord(SlotOf(place));
      usage = record.usage;
      row = record.row;
      full = record.full;
    } else if (usage_ || KindOf(place) == kCounted) {
      usage = pool(place).usage(SlotOf(place));
    }
    const bool counted = KindOf(place) == kCounted;
    if (!row && !counted) row = pool(place).row(SlotOf(place));
    if (decays) {
      usage.shows *= options_.score.decay;
      usage.clicks *= options_.score.decay;
      if (KindOf(place) == kDisk) {
        Record record = Take(record_.data());
        record.generation = generation_;
        record.usage = usage;
        WriteRecord(record_.data(), record, nullptr);
        WriteSlot(SlotOf(place), record_.data());
      } else {
        pool(place).usage(SlotOf(place)) = usage;
        pool(place).generation(SlotOf(place)) = generation_;
      }
    }
    const bool old =
        (rules.ttl_s && time_s > usage.time_s && time_s - usage.time_s > rules.ttl_s) ||
        (rules.ttl_steps && step > usage.step && step - usage.step > rules.ttl_steps);
    const bool low = rules.min_score > 0 && !counted &&
                     options_.ScoreOf(usage) < static_cast<float>(rules.min_score);
    const bool small = rules.min_norm > 0 && row && layout_.Norm(row, full) < rules.min_norm;
    if (old || low || small) out.emplace_back(key, place);
  };
  ForEachPlace(look);
  for (const auto& [key, place] : out) Evict(key, Mix(key), place);
  return out.size();
}

void Subtable::Worths(std::vector<Worth>* out) {
  ForEachPlace([&](uint64_t key, uint32_t place) {
    if (KindOf(place) == kCounted) return;
    const Usage usage =
        KindOf(place) == kDisk ? ReadRecord(SlotOf(place)).usage : pool(place).usage(SlotOf(place));
    const uint64_t late = uint64_t{usage.time_s} << 32 | usage.step;
    out->push_back({options_.eviction.by_count ? usage.count : late, key});
  });
}

void Subtable::EvictKey(uint64_t key) {
  const uint64_t hash = Mix(key);
  const uint32_t place = FindPlace(key, hash);
  if (place != Index::kNone) Evict(key, hash, place);
}

}  // namespace heterps::ps
