#include "table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "batch/parallel.h"

namespace heterps::ps {
namespace {

constexpr uint64_t kTrimmedAtOnce = 1 << 20;  // rows
constexpr size_t kParallelFrom = 16384;       // keys from which a batch is worth several threads
constexpr size_t kParallelOnDisk = 512;       // where rows are read by two system calls each
constexpr size_t kRange = 24576;              // keys that one of them groups at once
constexpr size_t kExpected = 512;             // keys, about, whose rows are being read from disk

// Whether memory is such that what is not counted is little of it: slabs that are not full, all of
// whose bytes large pages make resident, and what an index leaves as it grows.
bool IsAmple(const Options& options) {
  const uint64_t slabs = uint64_t{kSubtables} * Pool::kMost * options.layout.bytes(true);
  return !options.tiered() || options.memory_bytes / 16 >= slabs;
}

uint64_t LoadKey(const void* keys, size_t i, size_t key_bytes) {
  uint64_t key = 0;
  std::memcpy(&key, static_cast<const char*>(keys) + key_bytes * i, key_bytes);
  return key;
}

HETERPS_CLONES
bool AllFinite(const void* grads, size_t n) {
  const auto* words = static_cast<const char*>(grads);
  constexpr size_t kBlock = 4096;  // leave early, but branch rarely
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const char* block = words + 4 * begin;
    uint32_t bad = 0;
    for (size_t j = 0; j < count; ++j) {
      uint32_t bits;
      std::memcpy(&bits, block + 4 * j, 4);
      bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    if (bad) return false;
  }
  return true;
}

}  // namespace

void CheckFinite(const void* keys, size_t key_bytes, const void* grads, size_t n, size_t dim) {
  if (AllFinite(grads, n * dim)) return;
  const UnalignedFloat* values = static_cast<const UnalignedFloat*>(grads);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      if (std::isfinite(values[i * dim + j])) continue;
      throw std::invalid_argument("gradient of key " + std::to_string(LoadKey(keys, i, key_bytes)) +
                                  " (row " + std::to_string(i) + ") is " +
                                  std::to_string(values[i * dim + j]) + " at element " +
                                  std::to_string(j) + "; expected finite values");
    }
  }
}

Table::Table(Options options)
    : options_(std::move(options)),
      rows_(true, IsAmple(options_)),
      indices_(!IsAmple(options_), IsAmple(options_)),
      file_(options_.directory) {
  if (options_.tiered() && !file_.usable()) {
    throw std::invalid_argument("memory_bytes needs a directory for the rows on disk");
  }
  for (size_t s = 0; s < kSubtables; ++s) {
    // They do not all grow within the same batch. What rows on disk take of the memory is the
    // index, so that of a tier is packed closely and grows in small steps.
    const double load = (options_.tiered() ? 0.87 : 0.81) + 0.07 * s / kSubtables;
    const double growth = options_.tiered() ? 1.25 : 2;
    subtables_[s] =
        std::make_unique<Subtable>(options_, rows_, indices_, file_, duel_, s, load, growth);
  }
}

Table::Grouped Table::Group(const Range& range, const Mine& mine) {
  return range.key_bytes == 4 ? GroupOf<uint32_t>(range, mine) : GroupOf<uint64_t>(range, mine);
}

template <typename Key>
Table::Grouped Table::GroupOf(const Range& range, const Mine& mine) {
  const auto load = [keys = static_cast<const char*>(range.keys)](size_t i) {
    Key key;
    std::memcpy(&key, keys + i * sizeof(Key), sizeof(Key));
    return uint64_t{key};
  };
  const size_t n = range.end - range.begin;
  auto parts = std::make_unique_for_overwrite<uint8_t[]>(n);  // of those meant
  std::unique_ptr<uint32_t[]> which;                          // of the range they are
  std::array<size_t, kSubtables> next{};
  size_t meant = 0;
  if (mine.route) {
    which = std::make_unique_for_overwrite<uint32_t[]>(n);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t hash = Mix(load(range.begin + i));
      const bool is_mine = mine.route[BucketOf(hash)] == mine.shard;
      parts[meant] = static_cast<uint8_t>(SubtableOf(hash));
      which[meant] = static_cast<uint32_t>(i);
      next[parts[meant]] += is_mine;
      meant += is_mine;  // no branch: nobody could foretell it
    }
  } else {
    for (; meant < n; ++meant) {
      parts[meant] = static_cast<uint8_t>(SubtableOf(Mix(load(range.begin + meant))));
      ++next[parts[meant]];
    }
  }
  Grouped out{std::make_unique_for_overwrite<Item[]>(meant), {}};
  size_t total = 0;
  for (size_t s = 0; s < kSubtables; ++s) {
    out.begin[s] = total;
    total += next[s];
    next[s] = out.begin[s];
  }
  out.begin[kSubtables] = total;
  for (size_t j = 0; j < meant; ++j) {
    const size_t i = range.begin + (which ? which[j] : j);
    out.items[next[parts[j]]++] = {load(i), i};
  }
  return out;
}

// The sub-tables that a thread comes to next, and their records, which are being read.
class Coming {
 public:
  struct One {
    size_t subtable;
    std::unique_ptr<Fetched> fetched;  // null: their pages are being read
  };

  explicit Coming(DiskFile& file) : file_(file), ring_(file.Lend()) {}
  ~Coming() {
    all_.clear();  // once they are read
    file_.Return(std::move(ring_));
  }

  size_t size() const { return all_.size(); }

  template <typename Expect>
  void Ask(size_t subtable, Expect expect) {
    all_.push_back({subtable, nullptr});
    if (ring_) {
      all_.back().fetched = file_.Fetch(*ring_);
    }
    expect(all_.back().fetched.get());
    if (ring_) all_.back().fetched->Begin();
  }

  One Next() {
    One out = std::move(all_.front());
    all_.pop_front();
    if (out.fetched) out.fetched->Wait();
    return out;
  }

 private:
  DiskFile& file_;
  std::unique_ptr<Ring> ring_;
  std::deque<One> all_;
};

template <typename Work, typename After>
size_t Table::ForItems(const Range& whole, const Mine& mine, bool together, uint64_t turn,
                       Work work, After after) {
  const size_t n = whole.end;
  const bool on_disk = file_.bytes() > 0;
  const bool parallel = n >= (on_disk ? kParallelOnDisk : kParallelFrom);
  const auto for_each = [parallel](size_t count, const auto& task) {
    if (parallel) {
      ParallelFor(count, task);
    } else {
      for (size_t i = 0; i < count; ++i) task(i);
    }
  };
  // Between ranges rows may leave memory that the next one needs.
  const size_t ranges = together || !parallel ? 1 : std::max<size_t>(n / kRange, on_disk ? 1 : 2);
  std::vector<Grouped> grouped(ranges);
  for_each(ranges, [&](size_t r) {
    grouped[r] = Group({whole.keys, whole.key_bytes, n * r / ranges, n * (r + 1) / ranges}, mine);
  });
  // All of a sub-table at once: the pages of its rows and of its index are found again soon.
  const auto work_at = [&](size_t s, const Fetched* fetched) {
    Subtable& sub = *subtables_[s];
    std::unique_lock<std::mutex> lock;
    if (turn) {
      lock = std::unique_lock(sub.mutex);
      sub.passed.wait(lock, [&] { return sub.turn == turn; });
    }
    for (const Grouped& range : grouped) {
      const size_t begin = range.begin[s], count = range.begin[s + 1] - begin;
      if (count == 0) continue;
      if (!lock) lock = std::unique_lock(sub.mutex);
      const Subtable::Having having(sub, fetched);
      work(sub, &range.items[begin], count);
    }
    after(sub, &lock);
    if (turn) {
      ++sub.turn;
      sub.passed.notify_all();
    }
  };
  if (!on_disk) {
    for_each(kSubtables, [&](size_t s) { work_at(s, nullptr); });
  } else {
    // What lies on the disk is read while the sub-tables before are worked on: many rows at once,
    // and not those of all, which could be too many for the memory of a control group.
    const size_t threads = parallel ? Threads() : 1;
    const size_t ahead =
        std::clamp<size_t>(kExpected * kSubtables / (n + 1), 2, kSubtables / 2) / threads + 1;
    std::atomic<size_t> next{0};
    for_each(threads, [&](size_t) {
      if (next.load() >= kSubtables) return;
      Coming coming(file_);
      for (;;) {
        while (coming.size() < ahead) {
          const size_t s = next.fetch_add(1);
          if (s >= kSubtables) break;
          coming.Ask(s, [&](Fetched* to) {
            std::lock_guard lock(subtables_[s]->mutex);
            for (const Grouped& range : grouped) {
              subtables_[s]->Expect(&range.items[range.begin[s]],
                                    range.begin[s + 1] - range.begin[s], to);
            }
          });
        }
        if (coming.size() == 0) break;
        const Coming::One one = coming.Next();
        work_at(one.subtable, one.fetched.get());
      }
    });
  }
  size_t total = 0;
  for (const Grouped& range : grouped) total += range.begin[kSubtables];
  return total;
}

size_t Table::Pull(const void* keys, size_t n, size_t key_bytes, const PullBatch& batch) {
  if (n == 0) return 0;
  const size_t taken = ForItems(
      {keys, key_bytes, 0, n}, batch.mine, false, 0,
      [&](Subtable& sub, const Item* items, size_t count) { sub.Pull(items, count, batch); },
      [](Subtable&, std::unique_lock<std::mutex>*) {});
  if (batch.copy) pulled_.fetch_add(taken, std::memory_order_relaxed);
  return taken;
}

void Table::Push(const void* keys, size_t n, size_t key_bytes, const PushBatch& batch) {
  if (n == 0 && !batch.turn && !batch.shrink) return;
  if (!batch.turn) CheckRoom();  // else it has been
  std::atomic<bool> begun{false};
  try {
    ForItems(
        {keys, key_bytes, 0, n}, {}, !batch.distinct, batch.turn,
        [&](Subtable& sub, const Item* items, size_t count) {
          begun.store(true, std::memory_order_relaxed);
          sub.Push(items, count, batch);
        },
        [&](Subtable& sub, std::unique_lock<std::mutex>* lock) {
          if (!batch.shrink) return;
          if (!*lock) *lock = std::unique_lock(sub.mutex);
          begun.store(true, std::memory_order_relaxed);
          sub.Shrink(batch.time_s, batch.step, true, batch.shrink);
        });
  } catch (const std::exception& error) {
    if (begun) throw Broken(error.what());
    throw;
  }
  pushed_.fetch_add(n, std::memory_order_relaxed);
}

void Table::CheckRoom() {
  if (!file_.full()) return;
  Demote();
  file_.set_full(false);
}

void Table::Demote() {
  // A little below the limit, so that those who push rarely have to.
  const size_t target = options_.memory_bytes / kSubtables / 10 * 9;
  for (auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    sub->Demote(target);
  }
}

uint64_t Table::Shrink(uint32_t time_s, uint32_t step, bool decay) {
  uint64_t removed = 0;
  for (auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    removed += sub->Shrink(time_s, step, decay, nullptr);
  }
  return removed + Trim();
}

uint64_t Table::Trim() {
  const uint64_t most = options_.eviction.max_rows;
  uint64_t total = 0;
  for (const auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    total += sub->rows();
  }
  if (most == 0 || total <= most) return 0;
  // A list of all rows would be long: in a large table every sub-table, which has a random sample
  // of the keys, gives up its share.
  const bool at_once = total <= kTrimmedAtOnce;
  const double share = static_cast<double>(total - most) / static_cast<double>(total);
  uint64_t seen = 0, removed = 0;
  std::vector<Subtable::Worth> rows;
  for (size_t s = 0; s < kSubtables; ++s) {
    {
      std::lock_guard lock(subtables_[s]->mutex);
      seen += subtables_[s]->rows();
      subtables_[s]->Worths(&rows);
    }
    const bool last = s + 1 == kSubtables;
    if (at_once && !last) continue;
    const auto until =
        last ? total - most : static_cast<uint64_t>(static_cast<double>(seen) * share);
    removed += EvictLeast(&rows, until - removed);
    rows.clear();
  }
  return removed;
}

uint64_t Table::EvictLeast(std::vector<Subtable::Worth>* rows, uint64_t n) {
  n = std::min<uint64_t>(n, rows->size());
  const auto less = [](const Subtable::Worth& a, const Subtable::Worth& b) {
    return a.worth != b.worth ? a.worth < b.worth : Mix(a.key) < Mix(b.key);
  };
  const auto cut = rows->begin() + static_cast<ptrdiff_t>(n);
  std::nth_element(rows->begin(), cut, rows->end(), less);
  for (auto it = rows->begin(); it != cut; ++it) {
    Subtable& sub = *subtables_[SubtableOf(Mix(it->key))];
    std::lock_guard lock(sub.mutex);
    sub.EvictKey(it->key);
  }
  return n;
}

void Table::Erase(const Buckets& buckets) {
  for (auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    sub->Erase(buckets);
  }
}

uint64_t Table::Absorb(const void* block, size_t size, const Buckets* wanted, const Options* from) {
  BlockHeader header;
  if (size < sizeof(header)) throw std::invalid_argument("a block of rows ends early");
  std::memcpy(&header, block, sizeof(header));
  const auto kind = static_cast<BlockKind>(header.kind);
  const uint64_t body = uint64_t{header.count} * header.record_bytes;
  if (std::memcmp(header.magic, kBlockMagic, 4) != 0 || body != size - sizeof(header)) {
    throw std::invalid_argument("not a block of rows");
  }
  const char* record = static_cast<const char*>(block) + sizeof(header);
  if (kind == BlockKind::kBloom) {
    if (header.count != 1 || header.subtable >= kSubtables) {
      throw std::invalid_argument("a damaged block of counters");
    }
    Subtable& sub = *subtables_[header.subtable];
    std::lock_guard lock(sub.mutex);
    if (!sub.AbsorbBloom(record, header.record_bytes) && !from) {
      throw std::invalid_argument("a block of counters of another size");
    }
    return 0;
  }
  const bool rows = kind == BlockKind::kNarrow || kind == BlockKind::kFull;
  const Options& written = from ? *from : options_;
  const bool usage = written.usage() || kind == BlockKind::kCounted;
  const size_t expected = sizeof(uint64_t) +
                          (kind == BlockKind::kGone ? 0 : (usage ? sizeof(Usage) : 0)) +
                          (rows ? written.layout.bytes(kind == BlockKind::kFull) : 0);
  if (header.kind > static_cast<uint8_t>(BlockKind::kGone) || header.record_bytes != expected) {
    throw std::invalid_argument("a block of kind " + std::to_string(header.kind) + " has " +
                                std::to_string(header.record_bytes) + " bytes a record; expected " +
                                std::to_string(expected));
  }
  if (from && kind == BlockKind::kCounted && !options_.admission.exact()) return 0;
  const Layout& layout = options_.layout;
  std::vector<char> anew(from ? layout.bytes(true) : 0);
  std::vector<float> values(from ? layout.dim() : 0);
  uint64_t taken = 0;
  for (uint32_t i = 0; i < header.count; ++i, record += header.record_bytes) {
    uint64_t key;
    std::memcpy(&key, record, sizeof(key));
    const uint64_t hash = Mix(key);
    if (wanted && !(*wanted)[BucketOf(hash)]) continue;
    Subtable& sub = *subtables_[SubtableOf(hash)];
    std::lock_guard lock(sub.mutex);
    if (kind == BlockKind::kGone) {
      sub.AbsorbGone(key);
      continue;
    }
    Usage used;
    const char* row = record + sizeof(key);
    if (usage) {
      std::memcpy(&used, row, sizeof(used));
      row += sizeof(used);
    }
    if (from && rows) {
      from->layout.Read(row, kind == BlockKind::kFull, values.data());
      const bool full = kind == BlockKind::kFull || !layout.has_lazy();
      layout.Init(key, full, anew.data());
      layout.Put(anew.data(), values.data(), full, Layout::Write::kAssign, 0);
      sub.AbsorbRow(full ? BlockKind::kFull : BlockKind::kNarrow, key, used, anew.data());
    } else {
      sub.AbsorbRow(kind, key, used, row);
    }
    ++taken;
  }
  return taken;
}

uint32_t Table::Begin(const Selection* selection) {
  if (snapshotting_) throw std::runtime_error("the table is being saved already");
  for (const auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    if (selection->since > 0 && !sub->RemembersSince(selection->since)) {
      throw Forgotten(
          "too many rows were evicted since that save to name them all; save a whole one");
    }
  }
  snapshotting_ = true;
  scanning_ = 0;
  const uint32_t cut = ++generation_;
  for (auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    sub->BeginSnapshot(selection, cut);
  }
  return cut;
}

std::vector<char> Table::Next() {
  for (; snapshotting_ && scanning_ < kSubtables; ++scanning_) {
    Subtable& sub = *subtables_[scanning_];
    std::lock_guard lock(sub.mutex);
    std::vector<char> block = sub.NextBlock();
    if (!block.empty()) return block;
  }
  return {};
}

void Table::End() {
  for (auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    sub->EndSnapshot();
  }
  snapshotting_ = false;
}

Counters Table::counters() const {
  Counters total;
  for (const auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    const Counters c = sub->counters();
    total.rows += c.rows, total.waiting += c.waiting, total.disk_rows += c.disk_rows;
    total.bytes += c.bytes, total.missed += c.missed, total.evicted += c.evicted;
    total.promoted += c.promoted, total.demoted += c.demoted;
    total.tidied += c.tidied;
  }
  return total;
}

std::vector<uint64_t> Table::Keys(size_t limit) const {
  std::vector<uint64_t> keys;
  for (const auto& sub : subtables_) {
    std::lock_guard lock(sub->mutex);
    sub->Keys(limit, &keys);
  }
  return keys;
}

}  // namespace heterps::ps
