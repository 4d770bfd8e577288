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
int MoveFully(bool writes, int file, char* memory, uint64_t size, uint64_t at) {
  while (size > 0) {
    const auto place = static_cast<off_t>(at);
    const ssize_t done =
        writes ? ::pwrite(file, memory, size, place) : ::pread(file, memory, size, place);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return writes ? EIO : -1;
    memory += done, size -= static_cast<uint64_t>(done), at += static_cast<uint64_t>(done);
  }
  return 0;
}

void GiveBack(int file, uint64_t at, uint64_t size) {
  ::posix_fadvise(file, static_cast<off_t>(at), static_cast<off_t>(size), POSIX_FADV_DONTNEED);
}

// What comes of a write whose bytes are all with the system.
Transfer::Outcome Written(const Transfer& transfer) {
  const Extent& extent = transfer.extents.front();
  if (!transfer.direct) {
    if (::fdatasync(transfer.file) != 0) return {Transfer::Kind::kErrno, errno, 0, 0};
    GiveBack(transfer.file, extent.at, extent.size);
  }
  return {Transfer::Kind::kFine, 0, 0, Checksum(extent.memory, extent.size)};
}

// What comes of a read whose bytes are all there.
Transfer::Outcome Compared(const Transfer& transfer) {
  for (size_t i = 0; i < transfer.extents.size(); ++i) {
    const Extent& extent = transfer.extents[i];
    if (!extent.expected) continue;
    const uint32_t found = Checksum(extent.memory, extent.size);
    if (found != *extent.expected) return {Transfer::Kind::kDamaged, 0, i, found};
  }
  return {};
}

}  // namespace

Readers::Readers(size_t threads, bool ahead) : running_(threads + (ahead ? 1 : 0)) {
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  if (ahead) threads_.emplace_back([this] { WorkAhead(); });
}

void Readers::Begin(const TransferPtr& transfer, uint64_t part, const TransferPtr& then) {
  std::lock_guard lock(mutex_);
  Plan(*transfer, part);
  if (then) {
    Plan(*then, part);
    then->waits_ = true;
    transfer->then_ = then;
  }
  Ask(transfer);
}

void Readers::BeginAhead(const TransferPtr& transfer, uint64_t part) {
  {
    std::lock_guard lock(mutex_);
    Plan(*transfer, part);
    later_.push_back(transfer);
  }
  idle_.notify_one();
}

void Readers::Hurry(const TransferPtr& transfer) {
  std::lock_guard lock(mutex_);
  Ask(transfer);
}

uint64_t Readers::Drop(const TransferPtr& transfer) {
  std::unique_lock lock(mutex_);
  if (transfer->waits_) return 0;
  uint64_t size = 0;
  const size_t count = transfer->parts_.size() - transfer->begun_;
  for (; transfer->begun_ < transfer->parts_.size(); ++transfer->begun_) {
    size += transfer->parts_[transfer->begun_].size;
  }
  if (count > 0) {
    transfer->outcome_ = {Transfer::Kind::kDropped};
    End(*transfer, count, lock);
  }
  return size;
}

bool Readers::Wait(const std::vector<TransferPtr>& transfers, const GoesOn& goes_on) {
  const auto done = [&] {
    return std::any_of(transfers.begin(), transfers.end(),
                       [](const TransferPtr& one) { return one->done(); });
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

void Readers::Plan(Transfer& transfer, uint64_t part) {
  for (size_t i = 0; i < transfer.extents.size(); ++i) {
    const uint64_t size = transfer.extents[i].size;
    for (uint64_t from = 0; from < size; from += part) {
      transfer.parts_.push_back({i, from, std::min(part, size - from)});
    }
  }
  transfer.left_ = transfer.parts_.size();
  if (flying_ == 0) since_ = Clock::now();
  flying_ += transfer.left_;
}

void Readers::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_for_.wait(lock, [&] { return closed_ || !asked_.empty(); });
    if (asked_.empty()) return Leave();
    TransferPtr transfer = std::move(asked_.front());
    asked_.pop_front();
    MoveNeeded(*transfer, lock);
    if (asked_.empty() && needed_ == 0) idle_.notify_one();
    lock.unlock();
    transfer.reset();  // what it keeps alive may need the interpreter's lock to go
    lock.lock();
  }
}

void Readers::WorkAhead() {
  std::unique_lock lock(mutex_);
  while (true) {
    WaitForIdle(lock);
    if (closed_) return Leave();
    TransferPtr transfer = later_.front();
    const bool made = MoveNext(*transfer, lock);
    if (!made && !later_.empty() && later_.front() == transfer) later_.pop_front();
    lock.unlock();
    transfer.reset();
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

bool Readers::MoveNeeded(Transfer& transfer, std::unique_lock<std::mutex>& lock) {
  ++needed_;
  const bool found = MoveNext(transfer, lock);
  --needed_;
  return found;
}

bool Readers::MoveNext(Transfer& transfer, std::unique_lock<std::mutex>& lock) {
  if (transfer.begun_ == transfer.parts_.size()) return false;
  const Transfer::Part part = transfer.parts_[transfer.begun_++];
  const Extent& extent = transfer.extents[part.extent];
  Transfer::Outcome outcome{Transfer::Kind::kFine, 0, part.extent, 0};
  if (transfer.outcome_.kind == Transfer::Kind::kFine) {
    lock.unlock();
    try {
      if (transfer.before) transfer.before(part.extent, part.from);
      const uint64_t at = extent.at + part.from;
      const int error =
          MoveFully(transfer.writes, transfer.file, extent.memory + part.from, part.size, at);
      if (error != 0) {
        outcome.kind = error < 0 ? Transfer::Kind::kShort : Transfer::Kind::kErrno;
        outcome.error = std::max(error, 0);
      } else if (!transfer.direct && !transfer.writes) {
        GiveBack(transfer.file, at, part.size);
      }
    } catch (...) {
      outcome.kind = Transfer::Kind::kThrown;
    }
    lock.lock();
    if (outcome.kind != Transfer::Kind::kFine && transfer.outcome_.kind == Transfer::Kind::kFine) {
      transfer.outcome_ = outcome;
    }
  }
  End(transfer, 1, lock);
  return true;
}

void Readers::End(Transfer& transfer, size_t parts, std::unique_lock<std::mutex>& lock) {
  transfer.left_ -= parts;
  flying_ -= parts;
  if (flying_ == 0) busy_ += Clock::now() - since_;
  if (transfer.left_ > 0) return;
  if (transfer.outcome_.kind == Transfer::Kind::kFine) {  // nobody else has to do with it any more
    lock.unlock();
    const Transfer::Outcome outcome = transfer.writes ? Written(transfer) : Compared(transfer);
    lock.lock();
    transfer.outcome_ = outcome;
  }
  transfer.done_.store(true, std::memory_order_release);
  if (const TransferPtr& then = transfer.then_) {  // which `transfer` keeps, until it goes itself
    then->waits_ = false;
    if (transfer.outcome_.kind == Transfer::Kind::kFine) {
      Ask(then);
    } else {
      then->outcome_ = transfer.outcome_;
      then->begun_ = then->parts_.size();
      End(*then, then->parts_.size(), lock);
    }
  }
  ended_.notify_all();
}

void Readers::Ask(const TransferPtr& transfer) {
  const size_t parts = transfer->parts_.size() - transfer->begun_;
  asked_.insert(asked_.end(), parts, transfer);
  for (size_t i = 0; i < std::min(parts, threads_.size()); ++i) asked_for_.notify_one();
}

}  // namespace heterps::offload
