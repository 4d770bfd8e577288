#include "reads.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "checksum.h"

namespace heterps::offload {
namespace {

constexpr auto kAsked = std::chrono::milliseconds(100);  // whether a wait goes on

double Seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// 0, an errno, or -1 where the file ends early.
int ReadFully(int file, char* to, uint64_t size, uint64_t at) {
  while (size > 0) {
    const ssize_t done = ::pread(file, to, size, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return -1;
    to += done, size -= static_cast<uint64_t>(done), at += static_cast<uint64_t>(done);
  }
  return 0;
}

}  // namespace

Readers::Readers(size_t threads, bool ahead) : running_(threads + (ahead ? 1 : 0)) {
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  if (ahead) threads_.emplace_back([this] { WorkAhead(); });
}

void Readers::Begin(const ReadPtr& read, uint64_t part) {
  {
    std::lock_guard lock(mutex_);
    Plan(*read, part);
  }
  Hurry(read);
}

void Readers::BeginAhead(const ReadPtr& read, uint64_t part) {
  {
    std::lock_guard lock(mutex_);
    Plan(*read, part);
    later_.push_back(read);
  }
  idle_.notify_one();
}

void Readers::Hurry(const ReadPtr& read) {
  size_t parts;
  {
    std::lock_guard lock(mutex_);
    parts = read->parts_.size() - read->begun_;
    asked_.insert(asked_.end(), parts, read);
  }
  for (size_t i = 0; i < std::min(parts, threads_.size()); ++i) asked_for_.notify_one();
}

uint64_t Readers::Drop(const ReadPtr& read) {
  std::unique_lock lock(mutex_);
  uint64_t size = 0;
  const size_t count = read->parts_.size() - read->begun_;
  for (; read->begun_ < read->parts_.size(); ++read->begun_) {
    size += read->parts_[read->begun_].size;
  }
  if (count > 0) {
    read->outcome_ = {Read::Kind::kDropped};
    End(*read, count, lock);
  }
  return size;
}

bool Readers::Wait(const std::vector<ReadPtr>& reads, const GoesOn& goes_on) {
  const auto done = [&] {
    return std::any_of(reads.begin(), reads.end(), [](const ReadPtr& one) { return one->done(); });
  };
  if (done()) return true;
  const Clock::time_point begin = Clock::now();
  std::unique_lock lock(mutex_);
  const bool whole = WaitUntil(lock, goes_on, done);
  waited_ += Clock::now() - begin;
  return whole;
}

bool Readers::Close(const GoesOn& goes_on) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  asked_for_.notify_all();
  idle_.notify_all();
  if (!WaitUntil(lock, goes_on, [&] { return running_ == 0; })) return false;
  lock.unlock();
  for (std::thread& one : threads_) one.join();
  threads_.clear();
  return true;
}

template <typename Ready>
bool Readers::WaitUntil(std::unique_lock<std::mutex>& lock, const GoesOn& goes_on, Ready ready) {
  Clock::time_point next = Clock::now() + kAsked;
  while (!ready()) {
    if (ended_.wait_until(lock, next) == std::cv_status::no_timeout) continue;
    next = Clock::now() + kAsked;
    if (!goes_on) continue;
    lock.unlock();
    const bool on = goes_on();
    lock.lock();
    if (!on) return ready();
  }
  return true;
}

double Readers::busy() const {
  std::lock_guard lock(mutex_);
  return Seconds(flying_ > 0 ? busy_ + (Clock::now() - since_) : busy_);
}

double Readers::waited() const {
  std::lock_guard lock(mutex_);
  return Seconds(waited_);
}

size_t Readers::flying() const {
  std::lock_guard lock(mutex_);
  return flying_;
}

void Readers::Plan(Read& read, uint64_t part) {
  for (size_t i = 0; i < read.extents.size(); ++i) {
    const uint64_t size = read.extents[i].size;
    for (uint64_t from = 0; from < size; from += part) {
      read.parts_.push_back({i, from, std::min(part, size - from)});
    }
  }
  read.left_ = read.parts_.size();
  if (flying_ == 0) since_ = Clock::now();
  flying_ += read.left_;
}

void Readers::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_for_.wait(lock, [&] { return closed_ || !asked_.empty(); });
    if (asked_.empty()) return Leave();
    ReadPtr read = std::move(asked_.front());
    asked_.pop_front();
    ReadNeeded(*read, lock);
    if (asked_.empty() && needed_ == 0) idle_.notify_one();
    lock.unlock();
    read.reset();  // what it keeps alive may need the interpreter's lock to go
    lock.lock();
  }
}

void Readers::WorkAhead() {
  std::unique_lock lock(mutex_);
  while (true) {
    WaitForIdle(lock);
    if (closed_) return Leave();
    ReadPtr read = later_.front();
    if (!ReadNext(*read, lock) && !later_.empty() && later_.front() == read) later_.pop_front();
    lock.unlock();
    read.reset();
    lock.lock();
  }
}

void Readers::Leave() {
  --running_;
  ended_.notify_all();
}

void Readers::WaitForIdle(std::unique_lock<std::mutex>& lock) {
  idle_.wait(lock, [&] { return closed_ || (!later_.empty() && asked_.empty() && needed_ == 0); });
}

bool Readers::ReadNeeded(Read& read, std::unique_lock<std::mutex>& lock) {
  ++needed_;
  const bool found = ReadNext(read, lock);
  --needed_;
  return found;
}

bool Readers::ReadNext(Read& read, std::unique_lock<std::mutex>& lock) {
  if (read.begun_ == read.parts_.size()) return false;
  const Read::Part part = read.parts_[read.begun_++];
  const Extent& extent = read.extents[part.extent];
  Read::Outcome outcome{Read::Kind::kFine, 0, part.extent, 0};
  if (read.outcome_.kind == Read::Kind::kFine) {
    lock.unlock();
    try {
      if (read.before) read.before(part.extent, part.from);
      const uint64_t at = extent.at + part.from;
      const int error = ReadFully(read.file, extent.to + part.from, part.size, at);
      if (error != 0) {
        outcome.kind = error < 0 ? Read::Kind::kShort : Read::Kind::kErrno;
        outcome.error = std::max(error, 0);
      } else if (!read.direct) {
        ::posix_fadvise(read.file, static_cast<off_t>(at), static_cast<off_t>(part.size),
                        POSIX_FADV_DONTNEED);
      }
    } catch (...) {
      outcome.kind = Read::Kind::kThrown;
    }
    lock.lock();
    if (outcome.kind != Read::Kind::kFine && read.outcome_.kind == Read::Kind::kFine) {
      read.outcome_ = outcome;
    }
  }
  End(read, 1, lock);
  return true;
}

void Readers::End(Read& read, size_t parts, std::unique_lock<std::mutex>& lock) {
  read.left_ -= parts;
  flying_ -= parts;
  if (flying_ == 0) busy_ += Clock::now() - since_;
  if (read.left_ > 0) return;
  if (read.outcome_.kind == Read::Kind::kFine) {  // nobody else has to do with it any more
    Read::Outcome outcome;
    lock.unlock();
    for (size_t i = 0; i < read.extents.size() && outcome.kind == Read::Kind::kFine; ++i) {
      const Extent& extent = read.extents[i];
      if (!extent.expected) continue;
      const uint32_t found = Checksum(extent.to, extent.size);
      if (found != *extent.expected) outcome = {Read::Kind::kDamaged, 0, i, found};
    }
    lock.lock();
    read.outcome_ = outcome;
  }
  read.done_.store(true, std::memory_order_release);
  ended_.notify_all();
}

}  // namespace heterps::offload
