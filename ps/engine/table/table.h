// One embedding table of one shard: rows by 64-bit key, made when first pushed to.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "table/subtable.h"

namespace heterps::ps {

// More rows have been evicted since a save than the table can name.
class Forgotten : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Thread-safe. Keys are 8-byte (or 4-byte) little-endian integers at any alignment, and so are
// floats. Pulls may run beside everything. What changes rows (Push, Shrink, Erase, Absorb) must
// not run beside Begin: see ps/table/gate.py.
class Table {
 public:
  explicit Table(Options options);

  const Options& options() const { return options_; }
  size_t dim() const { return options_.layout.dim(); }

  // `key_bytes` is 8 or 4. A key without a row reads its first value; none is made. Returns how
  // many keys are those of `batch.route`.
  size_t Pull(const void* keys, size_t n, size_t key_bytes, const PullBatch& batch);
  // A place in the order of pushes: each row sees those that have one in this order, however they
  // come. Whoever takes it must Push with it: later ones wait.
  uint64_t TakeTurn() { return turns_.fetch_add(1, std::memory_order_relaxed) + 1; }
  // Sums the gradients of equal keys and applies the optimizer once to each; then, where the
  // batch says so, the eviction rules. What it throws but Broken has changed nothing.
  void Push(const void* keys, size_t n, size_t key_bytes, const PushBatch& batch);

  // Throws DiskFull while memory is over its limit and rows cannot go to disk.
  void CheckRoom();
  void Demote();
  uint64_t Shrink(uint32_t time_s, uint32_t step, bool decay);
  void Erase(const Buckets& buckets);
  // Takes the rows of a block whose buckets are wanted. With `from`, of which the block's table
  // was, they begin anew with its weights, which are as many, and with its usage and counts where
  // this table keeps any. Throws std::invalid_argument.
  uint64_t Absorb(const void* block, size_t size, const Buckets* wanted,
                  const Options* from = nullptr);

  // One snapshot at a time. Begin is quick: it names the cut, and `selection` must live until
  // End. Next returns blocks until an empty one. Begin throws Forgotten, or std::runtime_error
  // while there is another.
  uint32_t Begin(const Selection* selection);
  std::vector<char> Next();
  void End();
  bool snapshotting() const { return snapshotting_; }

  Counters counters() const;
  uint64_t pulled() const { return pulled_.load(std::memory_order_relaxed); }
  uint64_t pushed() const { return pushed_.load(std::memory_order_relaxed); }
  uint64_t disk_bytes() const { return file_.bytes(); }
  std::vector<uint64_t> Keys(size_t limit) const;

 private:
  // Items ordered by sub-table, stably; those of sub-table s are [begin[s], begin[s + 1]).
  struct Grouped {
    std::unique_ptr<Item[]> items;
    std::array<size_t, kSubtables + 1> begin;
  };
  // Some of a batch's keys.
  struct Range {
    const void* keys;
    size_t key_bytes;
    size_t begin, end;
  };
  // Removes the rows beyond max_rows; returns how many.
  uint64_t Trim();
  uint64_t EvictLeast(std::vector<Subtable::Worth>* rows, uint64_t n);
  static Grouped Group(const Range& range, const Mine& mine);
  template <typename Key>
  static Grouped GroupOf(const Range& range, const Mine& mine);
  // Calls work(sub-table, items, their number) for all keys meant; returns how many these are.
  // Sub-tables come side by side, each at its turn if there is one, and the items of one in several
  // calls unless `together`.
  // At last it calls after(sub-table, lock), the lock held or not, of each.
  template <typename Work, typename After>
  size_t ForItems(const Range& whole, const Mine& mine, bool together, uint64_t turn, Work work,
                  After after);

  Options options_;
  // Apart, so that an index that has grown leaves its place to others, not holes among the rows.
  Arena rows_, indices_;
  DiskFile file_;
  Duel duel_;
  std::array<std::unique_ptr<Subtable>, kSubtables> subtables_;
  std::atomic<uint64_t> pulled_{0}, pushed_{0}, turns_{0};
  uint32_t generation_ = 1;
  bool snapshotting_ = false;
  size_t scanning_ = 0;  // sub-table that Next is at
};

// Throws std::invalid_argument naming the first key whose gradient holds a NaN or an infinity.
void CheckFinite(const void* keys, size_t key_bytes, const void* grads, size_t n, size_t dim);

}  // namespace heterps::ps
