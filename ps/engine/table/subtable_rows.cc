// Pull and Push of one sub-table.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstring>
#include <memory>

#include "table/subtable.h"

namespace heterps::ps {
namespace {

constexpr size_t kChunk = 128;  // rows that are looked up, then read or changed, together

float FloatAt(const char* values, size_t i) {
  float value;
  std::memcpy(&value, values + i * sizeof(value), sizeof(value));
  return value;
}

}  // namespace

void Subtable::Expect(const Item* items, size_t n, Fetched* to) {
  std::array<Probed, kChunk> probes;
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const Item* chunk = items + begin;
    const size_t count = std::min(kChunk, n - begin);
    for (size_t i = 0; i < count; ++i) Look(chunk[i].key, &probes[i]);
    for (size_t i = 0; i < count; ++i) Fetch(0, &probes[i]);
    for (size_t i = 0; i < count; ++i) {
      if (FindInMemory(chunk[i].key, probes[i].hash) != Index::kNone) continue;
      index_.Find(probes[i].hash, [&](uint32_t place) {  // all that may be it
        if (KindOf(place) == kDisk) disk_.Expect(SlotOf(place), to);
        return false;
      });
    }
  }
}

void Subtable::Pull(const Item* items, size_t n, const PullBatch& batch) {
  for (size_t begin = 0; begin < n; begin += kChunk) {
    PullChunk(items + begin, std::min(kChunk, n - begin), batch);
    RelieveIfRoom();  // rows that come from disk need it, and no look-up is under way now
  }
}

void Subtable::PullChunk(const Item* items, size_t n, const PullBatch& batch) {
  const size_t dim = layout_.dim();
  const size_t bytes = dim * SizeOf(batch.dtype);
  const bool encode = batch.dtype != Dtype::kFloat32;
  std::vector<float> scratch(encode ? dim : 0);
  std::array<Probed, kChunk> probes;
  for (size_t i = 0; i < n; ++i) Look(items[i].key, &probes[i]);
  for (size_t i = 0; i < n; ++i) Fetch(read_bytes_, &probes[i]);
  for (size_t i = 0; i < n; ++i) {
    const Probed& probed = probes[i];
    const uint64_t key = items[i].key;
    uint32_t place = FindProbed(key, probed);
    const bool absent = place == Index::kNone || KindOf(place) == kCounted;
    counters_.missed += absent;
    const bool in_memory = !absent && KindOf(place) != kDisk;
    if (!absent && !in_memory && !batch.read_only) {
      place = Promote(key, probed.hash, place, 2);  // this pull, or one to come, and a push
    }
    if (!batch.copy) {
      if (in_memory && options_.tiered()) Heat::Expect(pool(place).heat(SlotOf(place)));
      continue;
    }
    char* to = batch.out + items[i].position * bytes;
    void* floats = encode ? static_cast<void*>(scratch.data()) : to;
    if (absent) {
      layout_.Fill(key, options_.admission.reads_zeros, floats);
    } else if (KindOf(place) == kDisk) {
      const Record record = ReadRecord(SlotOf(place));
      layout_.Read(record.row, record.full, floats);
    } else {
      Pool& rows = pool(place);
      if (options_.tiered() && !batch.read_only) Heat::Use(rows.heat(SlotOf(place)));
      layout_.Read(rows.row(SlotOf(place)), KindOf(place) == kFull, floats);
    }
    if (encode) Encode(batch.dtype, scratch.data(), dim, to);
  }
}

void Subtable::Push(const Item* items, size_t n, const PushBatch& batch) {
  const size_t bytes = layout_.dim() * sizeof(float);
  const auto entry = [&](const Item& item) {
    return Entry{item.key, batch.values + item.position * bytes,
                 batch.shows ? FloatAt(batch.shows, item.position) : 1.0f,
                 batch.clicks ? FloatAt(batch.clicks, item.position) : 0.0f};
  };
  if (batch.distinct) {
    std::array<Entry, kChunk> entries;
    for (size_t begin = 0; begin < n; begin += kChunk) {
      const size_t count = std::min(kChunk, n - begin);
      for (size_t i = 0; i < count; ++i) entries[i] = entry(items[begin + i]);
      PushChunk(entries.data(), count, batch);
    }
    return;
  }
  // Which keys repeat: a small hash table of positions in the list of distinct ones.
  const size_t capacity = std::bit_ceil(2 * n + 1);
  auto slots = std::make_unique<uint32_t[]>(capacity);  // 0: empty, else 1 + position
  std::vector<Entry> entries;
  std::vector<std::unique_ptr<float[]>> sums;  // of the keys that repeat, by position
  entries.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Entry given = entry(items[i]);
    size_t s = (Mix(given.key) >> 20) & (capacity - 1);
    while (slots[s] && entries[slots[s] - 1].key != given.key) s = (s + 1) & (capacity - 1);
    if (!slots[s]) {
      entries.push_back(given);
      slots[s] = static_cast<uint32_t>(entries.size());
    } else {
      Merge(given, slots[s] - 1, batch, &entries, &sums);
    }
  }
  for (size_t begin = 0; begin < entries.size(); begin += kChunk) {
    PushChunk(&entries[begin], std::min(kChunk, entries.size() - begin), batch);
  }
}

void Subtable::Merge(const Entry& given, size_t first, const PushBatch& batch,
                     std::vector<Entry>* entries,
                     std::vector<std::unique_ptr<float[]>>* sums) const {
  Entry& entry = (*entries)[first];
  entry.shows += given.shows;
  entry.clicks += given.clicks;
  if (batch.kind == PushBatch::Kind::kAssign) {
    entry.values = given.values;  // the last one holds
    return;
  }
  const size_t dim = layout_.dim();
  if (first >= sums->size()) sums->resize(first + 1);
  std::unique_ptr<float[]>& sum = (*sums)[first];
  if (!sum) {
    sum = std::make_unique_for_overwrite<float[]>(dim);
    std::memcpy(sum.get(), entry.values, dim * sizeof(float));
    entry.values = sum.get();
  }
  const UnalignedFloat* more = static_cast<const UnalignedFloat*>(given.values);
  for (size_t j = 0; j < dim; ++j) {
    // Finite gradients may sum to an infinity, which would spoil the row for good.
    sum[j] = std::clamp(sum[j] + more[j], -FLT_MAX, FLT_MAX);
  }
}

void Subtable::PushChunk(const Entry* entries, size_t n, const PushBatch& batch) {
  std::array<Probed, kChunk> probed;
  for (size_t i = 0; i < n; ++i) Look(entries[i].key, &probed[i]);
  for (size_t i = 0; i < n; ++i) {
    Fetch(layout_.bytes(true), &probed[i]);
    Prefetch(entries[i].values);  // in the order of the batch, not of the sub-tables
  }
  std::array<char*, kChunk> rows;
  std::array<const void*, kChunk> values;
  std::array<size_t, kChunk> widen;  // narrow rows that have earned the rest
  // Full rows from the front, narrow ones from the back.
  size_t full = 0, narrow = kChunk, wider = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t place = Obtain(entries[i], probed[i], batch);
    if (place == Index::kNone) continue;
    const bool is_full = KindOf(place) == kFull;
    const size_t at = is_full ? full++ : --narrow;
    rows[at] = pool(place).row(SlotOf(place));
    values[at] = entries[i].values;
    if (!is_full && usage_ &&
        options_.ScoreOf(pool(place).usage(SlotOf(place))) >= layout_.lazy_from()) {
      widen[wider++] = i;
    }
  }
  if (batch.kind == PushBatch::Kind::kGradient) {
    if (full) layout_.Apply(rows.data(), values.data(), full, true, batch.rate, batch.nonce);
    if (narrow < kChunk) {
      layout_.Apply(&rows[narrow], &values[narrow], kChunk - narrow, false, batch.rate,
                    batch.nonce);
    }
  } else {
    const auto how =
        batch.kind == PushBatch::Kind::kAdd ? Layout::Write::kAdd : Layout::Write::kAssign;
    for (size_t i = 0; i < full; ++i) layout_.Put(rows[i], values[i], true, how, batch.nonce);
    for (size_t i = narrow; i < kChunk; ++i) {
      layout_.Put(rows[i], values[i], false, how, batch.nonce);
    }
  }
  for (size_t w = 0; w < wider; ++w) {
    const uint64_t key = entries[widen[w]].key, hash = probed[widen[w]].hash;
    const uint32_t place = FindPlace(key, hash);
    if (KindOf(place) == kNarrow) Widen(key, hash, place);
  }
  RelieveIfRoom();
}

}  // namespace heterps::ps
