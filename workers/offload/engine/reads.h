// Threads that read parts of a file into memory, and write them, for one caller; none needs the
// interpreter, so that they neither wait for it nor hold it up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace heterps::offload {

// Where an extent lies, its memory, and its checksum if a read is to be compared with that.
struct Extent {
  uint64_t at;
  char* memory;
  uint64_t size;
  std::optional<uint32_t> expected;
};

// Extents to be read or written, and what came of it. All but `done` and `outcome` is guarded by
// the readers.
class Transfer {
 public:
  enum class Kind { kFine, kErrno, kShort, kDamaged, kDropped, kThrown };
  struct Outcome {
    Kind kind = Kind::kFine;
    int error = 0;       // kErrno
    size_t extent = 0;   // in which it happened
    uint32_t found = 0;  // the checksum of what was damaged, or of the extent that was written
  };

  Transfer(int file, bool direct, bool writes, std::vector<Extent> extents,
           std::shared_ptr<void> memory, std::function<void(size_t, uint64_t)> before)
      : file(file),
        direct(direct),
        writes(writes),
        extents(std::move(extents)),
        memory(std::move(memory)),
        before(std::move(before)) {}

  const int file;
  const bool direct;  // else the pages that it leaves behind are given back
  const bool writes;  // one extent, which stays as it is until it is done
  const std::vector<Extent> extents;
  const std::shared_ptr<void> memory;  // keeps alive that of the extents
  // Called before each part, of which extent and from where on: a disk as slow as wanted.
  const std::function<void(size_t, uint64_t)> before;

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Outcome& outcome() const { return outcome_; }  // once it is done

 private:
  friend class Readers;
  struct Part {
    size_t extent;
    uint64_t from, size;
  };
  std::vector<Part> parts_;
  size_t begun_ = 0;                // of the parts
  size_t left_ = 0;                 // parts that have not ended
  std::shared_ptr<Transfer> then_;  // to the same memory, begun when this is done
  bool waits_ = false;              // is such a one, and not begun
  Outcome outcome_;
  std::atomic<bool> done_{false};
};

using TransferPtr = std::shared_ptr<Transfer>;

// Reads end in any order. Those ahead are made by one thread of their own, part by part, so that of
// one that turns out to be of no use a single part is in the way of others.
class Readers {
 public:
  Readers(size_t threads, bool ahead);
  ~Readers() { Close({}); }
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;

  // Has it made in parts of so many bytes. `then`, to the same memory, follows when it is done, and
  // fails of what it fails of; until then it is not dropped.
  void Begin(const TransferPtr& transfer, uint64_t part, const TransferPtr& then = nullptr);
  // While nobody reads what was begun otherwise, and behind others ahead; until it is hurried or
  // dropped.
  void BeginAhead(const TransferPtr& transfer, uint64_t part);
  // All threads make what has not begun of it.
  void Hurry(const TransferPtr& transfer);
  // Nothing more of it is made; bytes that are not. It is done when what is under way has ended.
  uint64_t Drop(const TransferPtr& transfer);
  // Asked now and then by whoever waits for others, without the lock: false breaks that off.
  using GoesOn = std::function<bool()>;
  // Until one of these is done. The caller reads nothing of them itself, since nothing could break
  // that off while a disk hangs. False where it was broken off.
  bool Wait(const std::vector<TransferPtr>& transfers, const GoesOn& goes_on);
  // Waits for all that was begun, but not for what was only to be read ahead. False where it was
  // broken off: the threads end when they can, and this is to be called again.
  bool Close(const GoesOn& goes_on);

  double busy() const;    // seconds in which any was under way
  double waited() const;  // seconds in which the caller could only wait
  size_t flying() const;  // parts that were begun, or are to be

 private:
  using Clock = std::chrono::steady_clock;

  void Plan(Transfer& transfer, uint64_t part);  // under the lock
  // Until `ready`, of what `ended_` tells.
  template <typename Ready>
  bool WaitUntil(std::unique_lock<std::mutex>& lock, const GoesOn& goes_on, Ready ready);
  void Work();
  void WorkAhead();
  void Leave();                                          // of a thread, the lock held
  void WaitForIdle(std::unique_lock<std::mutex>& lock);  // or the end
  // Makes the next part of it, if there is one; the lock is free meanwhile.
  bool MoveNext(Transfer& transfer, std::unique_lock<std::mutex>& lock);
  // The same, of what is needed: nothing is read ahead meanwhile.
  bool MoveNeeded(Transfer& transfer, std::unique_lock<std::mutex>& lock);
  void End(Transfer& transfer, size_t parts, std::unique_lock<std::mutex>& lock);
  void Ask(const TransferPtr& transfer);  // under the lock: for threads to make its parts

  mutable std::mutex mutex_;
  std::condition_variable asked_for_, idle_, ended_;
  std::deque<TransferPtr> asked_;  // one for each part that a thread is to make
  std::deque<TransferPtr> later_;
  size_t needed_ = 0;   // parts under way that are not ahead
  size_t running_ = 0;  // threads
  bool closed_ = false;
  size_t flying_ = 0;
  Clock::time_point since_;
  Clock::duration busy_{}, waited_{};
  std::vector<std::thread> threads_;
};

}  // namespace heterps::offload
