// One embedding table of one shard: rows by 64-bit key, made when first asked for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "initializer.h"
#include "optimizer.h"
#include "rows.h"
#include "window.h"

namespace heterps::ps {

// Pushes hold the gate shared, a save holds it alone. The turnstile keeps a stream of pushes
// from starving a save.
class Gate {
 public:
  class Pass {
   public:
    explicit Pass(Gate& gate) : gate_(gate) {
      std::lock_guard turn(gate.turnstile_);
      gate.mutex_.lock_shared();
    }
    ~Pass() { gate_.mutex_.unlock_shared(); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    Gate& gate_;
  };

  void Close() {
    std::lock_guard turn(turnstile_);
    mutex_.lock();
  }
  void Open() { mutex_.unlock(); }

 private:
  std::mutex turnstile_;
  std::shared_mutex mutex_;
};

// Thread-safe. Keys are 8-byte little-endian integers at any alignment, and so are floats.
class Table {
 public:
  Table(size_t dim, Optimizer optimizer, Initializer initializer);

  size_t dim() const { return dim_; }
  size_t state_width() const { return width_ - dim_; }
  const Optimizer& optimizer() const { return optimizer_; }

  // Writes n x dim floats to `out`. A missing key grows a row unless `read_only`.
  void Pull(const void* keys, size_t n, bool read_only, void* out);

  // Sums the gradients of equal keys and applies the optimizer once to each. Throws
  // std::invalid_argument, with nothing applied, when a gradient is not finite.
  void Push(const void* keys, const void* grads, size_t n);

  // Push, unless `window` has seen (client, epoch, sequence); a repeat returns after the first
  // has been applied.
  Window::Verdict PushOnce(Window& window, std::string_view client, uint64_t epoch,
                           uint64_t sequence, const void* keys, const void* grads, size_t n);

  // While paused no push is applied; Save belongs between the two, on one thread.
  void Pause() { gate_.Close(); }
  void Resume() { gate_.Open(); }

  // file.cc. Save returns the number of rows written; Load, the number kept: those whose shard
  // of `shards` is `shard`. Loaded rows replace rows of the same key.
  uint64_t Save(const std::string& path, std::string_view spec);
  uint64_t Load(const std::string& path, uint32_t shard, uint32_t shards);

  uint64_t rows() const;
  uint64_t bytes() const;
  uint64_t pulled() const { return pulled_.load(std::memory_order_relaxed); }
  uint64_t pushed() const { return pushed_.load(std::memory_order_relaxed); }
  std::vector<uint64_t> Keys() const;

 private:
  struct Item {
    uint64_t key;
    size_t position;
  };
  // Items ordered by sub-table, stably; those of sub-table s are [begin[s], begin[s + 1]).
  struct Grouped {
    std::unique_ptr<Item[]> items;
    std::array<size_t, kSubtables + 1> begin;
  };
  struct alignas(64) Subtable {
    mutable std::mutex mutex;
    std::unique_ptr<Rows> rows;
  };

  Grouped Group(const void* keys, size_t n) const;
  void Apply(const void* keys, const void* grads, size_t n);
  void PullGroup(Subtable& sub, const Item* items, size_t n, bool read_only, char* out);
  void PushGroup(Subtable& sub, const Item* items, size_t n, const char* grads);
  // Row addresses of the items, making rows that are missing. True when a key repeats.
  bool Resolve(Rows& rows, const Item* items, size_t n, float** out);
  void InitRow(uint64_t key, float* row) const;

  size_t dim_;
  size_t width_;  // dim + state
  Optimizer optimizer_;
  Initializer initializer_;
  Gate gate_;
  std::array<Subtable, kSubtables> subtables_;
  std::atomic<uint64_t> pulled_{0}, pushed_{0};
};

// Throws std::invalid_argument naming the first key whose gradient holds a NaN or an infinity.
void CheckFinite(const void* keys, const void* grads, size_t n, size_t dim);

}  // namespace heterps::ps
