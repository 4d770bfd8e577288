// One of a table's 64 parts: an index over pools of rows, in memory and on disk.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "table/block.h"
#include "table/disk.h"
#include "table/duel.h"
#include "table/heat.h"
#include "table/index.h"
#include "table/options.h"
#include "table/pool.h"

namespace heterps::ps {

struct Item {
  uint64_t key;
  size_t position;  // in the batch
};

// Which keys of a batch are meant: those whose bucket `route` gives to `shard`; null: all.
struct Mine {
  const uint16_t* route = nullptr;
  uint16_t shard = 0;
};

struct PullBatch {
  bool read_only = false;
  bool copy = true;  // false: only bring rows into memory
  Dtype dtype = Dtype::kFloat32;
  char* out = nullptr;
  Mine mine = {};  // the rows of other keys stay as they are
};

struct PushBatch {
  enum class Kind { kGradient, kAdd, kAssign };
  Kind kind = Kind::kGradient;
  const char* values = nullptr;  // dim floats each, of any alignment
  const char* shows = nullptr;   // a float each, or none: one show each
  const char* clicks = nullptr;
  float rate = 1;
  bool distinct = false;            // no key comes twice
  const Buckets* shrink = nullptr;  // whose rows the eviction rules are applied to after it
  uint64_t nonce = 0;               // of the push: all that is random about it follows from this
  uint64_t turn = 0;                // see Table::TakeTurn; 0: beside all others
  uint32_t time_s = 0;
  uint32_t step = 0;
};

struct Counters {
  uint64_t rows = 0, waiting = 0, disk_rows = 0, bytes = 0;
  uint64_t missed = 0, evicted = 0, promoted = 0, demoted = 0, tidied = 0;
};

// Not thread-safe: its mutex guards every call.
//
// While a snapshot is taken, rows are written as they were at the cut: a row that is about to
// change, move or go, and has not been written yet, is copied aside first. That costs what the
// training touches, not the size of the table.
class alignas(64) Subtable {
 public:
  Subtable(const Options& options, Arena& rows, Arena& indices, DiskFile& file, Duel& duel,
           size_t number, double max_load, double growth);

  mutable std::mutex mutex;
  std::condition_variable passed;  // the turn has gone on
  uint64_t turn = 1;               // the push that comes next, of those that have one

  // Has the disk read what of these lies there: all that a batch needs at once.
  void Expect(const Item* items, size_t n, Fetched* to);
  // While it is there, records are taken from what was read so, as far as they are the same still.
  class Having {
   public:
    Having(Subtable& at, const Fetched* fetched) : at_(at) { at_.fetched_ = fetched; }
    ~Having() { at_.fetched_ = nullptr; }
    Having(const Having&) = delete;
    Having& operator=(const Having&) = delete;

   private:
    Subtable& at_;
  };
  void Pull(const Item* items, size_t n, const PullBatch& batch);
  void Push(const Item* items, size_t n, const PushBatch& batch);

  // Moves the coldest rows to disk until memory is within `bytes`. Throws DiskFull.
  void Demote(size_t bytes);
  // Applies the eviction rules but max_rows to the rows of some buckets; null: all. Returns the
  // number of keys removed.
  uint64_t Shrink(uint32_t time_s, uint32_t step, bool decay, const Buckets* of);
  // What max_rows goes by: the rows worth least are removed first.
  struct Worth {
    uint64_t worth;
    uint64_t key;
  };
  void Worths(std::vector<Worth>* out);
  void EvictKey(uint64_t key);
  size_t rows() const { return pools_[kNarrow].size() + pools_[kFull].size() + disk_.size(); }
  // Forgets the rows of some buckets, without a trace.
  void Erase(const Buckets& buckets);

  // Takes the rows of a block whose buckets are wanted; they replace rows of the same key.
  void AbsorbRow(BlockKind kind, uint64_t key, const Usage& usage, const char* row);
  void AbsorbGone(uint64_t key);
  bool AbsorbBloom(const char* counters, size_t size) { return bloom_.Merge(counters, size); }

  // Begins a snapshot of what is here now. Whatever changes from now on has generation `cut`.
  void BeginSnapshot(const Selection* selection, uint32_t cut);
  void EndSnapshot();
  // The next block; empty at the end.
  std::vector<char> NextBlock();
  // Whether all removals since that cut are still known.
  bool RemembersSince(uint32_t since) const { return gone_from_ <= since; }

  Counters counters() const;
  size_t bytes() const;
  size_t live_bytes() const;  // without what removed rows have left
  void Keys(size_t limit, std::vector<uint64_t>* out);

 private:
  enum Place : uint32_t { kCounted = 0, kNarrow = 1, kFull = 2, kDisk = 3 };
  static uint32_t PlaceFor(uint32_t kind, uint32_t slot) { return kind << 30 | slot; }
  static uint32_t KindOf(uint32_t place) { return place >> 30; }
  static uint32_t SlotOf(uint32_t place) { return place & ((1u << 30) - 1); }

  struct Entry {  // a key of a push
    uint64_t key;
    const void* values;
    float shows, clicks;
  };
  struct Probed {
    uint64_t hash;
    uint32_t place;  // where its row may be, as of the probe
  };
  Pool& pool(uint32_t place) { return pools_[KindOf(place)]; }
  uint64_t KeyAt(uint32_t place);  // of a row on disk
  uint32_t FindInMemory(uint64_t key, uint64_t hash);
  uint32_t FindPlace(uint64_t key, uint64_t hash);
  // A look-up in three steps, each of a chunk of keys, so that their cache misses overlap: the
  // bucket of the index, the row that it names, and then the comparison of keys.
  void Look(uint64_t key, Probed* out) const {
    out->hash = Mix(key);
    index_.PrefetchBucket(out->hash);
  }
  void Fetch(size_t row_bytes, Probed* out);
  uint32_t FindProbed(uint64_t key, const Probed& probed);
  void Insert(uint64_t key, uint64_t hash, uint32_t place);
  void Grow();
  template <typename Visit>
  void ForEachPlace(Visit visit);
  // Until `visit` says false. Records that it reads and writes are at hand.
  template <typename Visit>
  void ForEachOnDisk(Visit visit);

  uint32_t Create(uint64_t key, uint64_t hash, bool full);
  // The row for a push, made or fetched where need be; kNone when the key is not admitted.
  uint32_t Obtain(const Entry& entry, const Probed& probed, const PushBatch& batch);
  bool Admits(uint64_t hash, const Usage& usage, const PushBatch& batch);
  void Count(Usage& usage, const Entry& entry, const PushBatch& batch);
  // Adds what is given to an earlier entry of the same key.
  void Merge(const Entry& given, size_t first, const PushBatch& batch, std::vector<Entry>* entries,
             std::vector<std::unique_ptr<float[]>>* sums) const;
  void PullChunk(const Item* items, size_t n, const PullBatch& batch);
  void PushChunk(const Entry* entries, size_t n, const PushBatch& batch);

  // Moves a row; its key's place in the index follows.
  // Into memory, for so many uses.
  uint32_t Promote(uint64_t key, uint64_t hash, uint32_t place, uint8_t uses);
  uint32_t Widen(uint64_t key, uint64_t hash, uint32_t place);
  void Remove(uint64_t key, uint64_t hash, uint32_t place);
  void Evict(uint64_t key, uint64_t hash, uint32_t place);
  // The generation of a row that moves.
  uint32_t Moved(uint32_t generation) const { return snapshot_ ? generation_ : generation; }

  struct Record {  // a row on disk, taken apart
    uint64_t key;
    uint32_t generation;
    bool full;
    uint8_t heat;  // of now
    Usage usage;
    char* row;
  };
  // Where the record of a slot of the extent that is being looked through is at hand; else null.
  char* AtHand(uint32_t slot) const;
  void ReadSlot(uint32_t slot, char* record);
  // Of that extent.
  void WriteSlot(uint32_t slot, const char* record);
  Record ReadRecord(uint32_t slot);
  Record Take(char* record) const;
  // To `to`, but for the row where `row` is null: it is there.
  void WriteRecord(char* to, const Record& record, const char* row) const;
  // Rows of a pool that are to leave: all of lower ranks (Heat) and so many of the same.
  struct Coldest {
    unsigned rank;
    size_t equal;
  };
  Coldest ColdestOf(uint32_t kind, size_t rows);
  void Relieve();  // Throws DiskFull.
  void RelieveIfRoom();
  // Moves what is left of extents with many holes together, so that they can be filled again.
  void Tidy();
  // Moves the rows of an extent that begins there; whether there was room for all.
  bool Empty(uint32_t first);
  // Moves rows together, so that memory their neighbours have left can go.
  void Compact(uint32_t kind);

  // The cut.
  bool Wanted(uint64_t key, uint32_t generation, float score) const;
  bool Written(uint32_t place) const;
  void SaveBefore(uint32_t place);
  void Put(BlockKind kind, uint64_t key, const Usage& usage, const char* row,
           std::optional<BlockWriter>* writer) const;
  void ScanPool(uint32_t kind, std::optional<BlockWriter>* writer);
  void ScanDisk(std::optional<BlockWriter>* narrow, std::optional<BlockWriter>* full);

  const Options& options_;
  const Layout& layout_;
  const bool usage_;
  const bool counts_;  // shows within a push are summed: usage, or a Bloom filter, needs them
  const size_t number_;
  Duel& duel_;
  Index index_;
  std::array<Pool, 3> pools_;
  DiskRows disk_;
  Bloom bloom_;
  std::array<uint32_t, 3> hands_{};  // where Demote goes on, which takes equals in turn
  uint8_t round_ = 0;                // of halving what rows' uses are counted as
  const size_t read_bytes_;          // of a row that a pull reads
  std::vector<char> record_;         // scratch
  const Fetched* fetched_ = nullptr;
  // The extent that is being looked through; what is changed of it is written together.
  struct Extent {
    uint32_t first, count;
    char* records;
    bool changed;
  };
  Extent* extent_ = nullptr;
  Counters counters_;

  uint32_t generation_ = 1;
  std::deque<std::pair<uint64_t, uint32_t>> gone_;  // removed keys, oldest first
  uint32_t gone_from_ = 0;  // removals of this generation and later are all in gone_

  const Selection* snapshot_ = nullptr;
  uint32_t cursor_kind_ = 0, cursor_slot_ = 0;
  std::array<std::optional<BlockWriter>, 3> before_;
  std::deque<std::vector<char>> ready_;
};

inline void Subtable::Fetch(size_t row_bytes, Probed* out) {
  const uint32_t place = out->place = index_.Candidate(out->hash);
  if (place == Index::kNone || KindOf(place) == kDisk) return;
  Pool& rows = pool(place);
  const char* head = rows.head(SlotOf(place));
  const size_t bytes = rows.head_bytes() + std::min(rows.row_bytes(), row_bytes);
  for (size_t b = 0; b < bytes; b += 64) PrefetchFar(head + b);
  PrefetchFar(head + bytes - 1);
}

inline uint32_t Subtable::FindProbed(uint64_t key, const Probed& probed) {
  const uint32_t place = probed.place;
  // The place may have gone to another key since, or to none.
  if (place != Index::kNone && KindOf(place) != kDisk) {
    Pool& rows = pool(place);
    if (rows.key(SlotOf(place)) == key && rows.generation(SlotOf(place)) != 0) return place;
  }
  return FindPlace(key, probed.hash);
}

// Every key and its place, in memory and then on disk.
template <typename Visit>
void Subtable::ForEachPlace(Visit visit) {
  for (uint32_t kind = 0; kind < 3; ++kind) {
    Pool& rows = pools_[kind];
    for (uint32_t slot = 0; slot < rows.end(); ++slot) {
      if (rows.generation(slot) != 0) visit(rows.key(slot), PlaceFor(kind, slot));
    }
  }
  ForEachOnDisk([&](uint64_t key, uint32_t place) {
    visit(key, place);
    return true;
  });
}

template <typename Visit>
void Subtable::ForEachOnDisk(Visit visit) {
  std::vector<char> records;
  for (uint32_t first = 0; first < disk_.end();) {
    const uint32_t count = std::min(DiskRows::Together(first), disk_.end() - first);
    records.resize(count * disk_.record_bytes());
    disk_.ReadMany(first, count, records.data());
    Extent extent{first, count, records.data(), false};
    bool more = true;
    extent_ = &extent;
    try {
      for (uint32_t i = 0; more && i < count; ++i) {
        if (!disk_.used(first + i)) continue;
        DiskRows::Head head;
        std::memcpy(&head, &records[i * disk_.record_bytes()], sizeof(head));
        more = visit(head.key, PlaceFor(kDisk, first + i));
      }
    } catch (...) {
      extent_ = nullptr;
      throw;
    }
    extent_ = nullptr;
    if (extent.changed) disk_.Rewrite(first, count, records.data());
    if (!more) return;
    first += count;
  }
}

}  // namespace heterps::ps
