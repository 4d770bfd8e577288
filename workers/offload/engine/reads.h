// Threads that read parts of a file into memory, for one caller; none of them needs the
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

// Where an extent lies, where it is to go, and its checksum if that is to be compared.
struct Extent {
  uint64_t at;
  char* to;
  uint64_t size;
  std::optional<uint32_t> expected;
};

// Extents to be read, and what came of it. All but `done` and `outcome` is guarded by the readers.
class Read {
 public:
  enum class Kind { kFine, kErrno, kShort, kDamaged, kDropped, kThrown };
  struct Outcome {
    Kind kind = Kind::kFine;
    int error = 0;       // kErrno
    size_t extent = 0;   // in which it happened
    uint32_t found = 0;  // kDamaged
  };

  Read(int file, bool direct, std::vector<Extent> extents, std::shared_ptr<void> memory,
       std::function<void(size_t, uint64_t)> before)
      : file(file),
        direct(direct),
        extents(std::move(extents)),
        memory(std::move(memory)),
        before(std::move(before)) {}

  const int file;
  const bool direct;  // else the pages that a read leaves behind are given back
  const std::vector<Extent> extents;
  const std::shared_ptr<void> memory;  // keeps alive what the extents go to
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
  size_t begun_ = 0;  // of the parts
  size_t left_ = 0;   // parts that have not ended
  Outcome outcome_;
  std::atomic<bool> done_{false};
};

using ReadPtr = std::shared_ptr<Read>;

// Reads end in any order. Those ahead are made by one thread of their own, part by part, so that of
// one that turns out to be of no use a single part is in the way of others.
class Readers {
 public:
  Readers(size_t threads, bool ahead);
  ~Readers() { Close({}); }
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;

  // Has it read in parts of so many bytes.
  void Begin(const ReadPtr& read, uint64_t part);
  // While nobody reads what was begun otherwise, and behind others ahead; until it is hurried or
  // dropped.
  void BeginAhead(const ReadPtr& read, uint64_t part);
  // All threads read what has not begun of it.
  void Hurry(const ReadPtr& read);
  // Nothing more of it is read; bytes that are not. It is done when what is under way has ended.
  uint64_t Drop(const ReadPtr& read);
  // Asked now and then by whoever waits for others, without the lock: false breaks that off.
  using GoesOn = std::function<bool()>;
  // Until one of these is done. The caller reads nothing of them itself, since nothing could break
  // that off while a disk hangs. False where it was broken off.
  bool Wait(const std::vector<ReadPtr>& reads, const GoesOn& goes_on);
  // Waits for all that was begun, but not for what was only to be read ahead. False where it was
  // broken off: the threads end when they can, and this is to be called again.
  bool Close(const GoesOn& goes_on);

  double busy() const;    // seconds in which reads were under way
  double waited() const;  // seconds in which the caller could only wait
  size_t flying() const;  // parts that were begun, or are to be

 private:
  using Clock = std::chrono::steady_clock;

  void Plan(Read& read, uint64_t part);  // under the lock
  // Until `ready`, of what `ended_` tells.
  template <typename Ready>
  bool WaitUntil(std::unique_lock<std::mutex>& lock, const GoesOn& goes_on, Ready ready);
  void Work();
  void WorkAhead();
  void Leave();                                          // of a thread, the lock held
  void WaitForIdle(std::unique_lock<std::mutex>& lock);  // or the end
  // Reads the next part of it, if there is one; the lock is free meanwhile.
  bool ReadNext(Read& read, std::unique_lock<std::mutex>& lock);
  // The same, of what is needed: nothing is read ahead meanwhile.
  bool ReadNeeded(Read& read, std::unique_lock<std::mutex>& lock);
  void End(Read& read, size_t parts, std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable asked_for_, idle_, ended_;
  std::deque<ReadPtr> asked_;  // one for each part that a thread is to read
  std::deque<ReadPtr> later_;
  size_t needed_ = 0;   // parts under way that are not ahead
  size_t running_ = 0;  // threads
  bool closed_ = false;
  size_t flying_ = 0;
  Clock::time_point since_;
  Clock::duration busy_{}, waited_{};
  std::vector<std::thread> threads_;
};

}  // namespace heterps::offload
