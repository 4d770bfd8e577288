#include "table/ring.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#define HETERPS_HAS_URING 1
#endif

namespace heterps::ps {

#ifdef HETERPS_HAS_URING

namespace {

constexpr unsigned kMost = 60;  // under way at once: two of these are what many a disk takes

unsigned Load(unsigned* from) { return std::atomic_ref(*from).load(std::memory_order_acquire); }
void Store(unsigned* to, unsigned value) {
  std::atomic_ref(*to).store(value, std::memory_order_release);
}

}  // namespace

std::unique_ptr<Ring> Ring::Open() {
  io_uring_params params{};
  std::unique_ptr<Ring> out(new Ring);
  out->fd_ = static_cast<int>(::syscall(SYS_io_uring_setup, kMost, &params));
  if (out->fd_ < 0) return nullptr;
  const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
  if ((params.features & needed) != needed) return nullptr;
  const auto map = [&](size_t size, uint64_t offset) {
    void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, out->fd_,
                      static_cast<off_t>(offset));
    return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
  };
  out->queue_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                               params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  out->entry_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  out->queue_ = map(out->queue_bytes_, IORING_OFF_SQ_RING);
  out->entries_ = map(out->entry_bytes_, IORING_OFF_SQES);
  if (!out->queue_ || !out->entries_) return nullptr;
  const auto at = [&](unsigned offset) {
    return reinterpret_cast<unsigned*>(out->queue_ + offset);
  };
  out->head_ = at(params.sq_off.head), out->tail_ = at(params.sq_off.tail);
  out->mask_ = *at(params.sq_off.ring_mask);
  out->done_head_ = at(params.cq_off.head), out->done_tail_ = at(params.cq_off.tail);
  out->done_mask_ = *at(params.cq_off.ring_mask);
  out->done_ = at(params.cq_off.cqes);
  for (unsigned i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
  out->Push(nullptr);  // whether it may also be used
  if (!out->Enter(1) || !out->TakeDone()) return nullptr;
  return out;
}

bool Ring::CanRead(int fd) {
  alignas(4096) static char page[4096];
  iovec some{page, sizeof(page)};
  return ::preadv2(fd, &some, 1, 0, RWF_NOWAIT) >= 0 || errno != EOPNOTSUPP;
}

Ring::~Ring() {
  if (queue_) ::munmap(queue_, queue_bytes_);
  if (entries_) ::munmap(entries_, entry_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void Ring::Read(int fd, void* bytes, size_t size, uint64_t offset, Asked* asked) {
  asked->fd_ = fd, asked->bytes_ = bytes, asked->offset_ = offset;
  asked->size_ = static_cast<uint32_t>(size);
  waiting_.push_back(asked);
}

void Ring::Push(Asked* asked) {
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[*tail_ & mask_];
  entry = {};
  entry.opcode = IORING_OP_NOP;
  if (asked) {
    entry.opcode = IORING_OP_READ;
    entry.rw_flags = RWF_NOWAIT;
    entry.fd = asked->fd_;
    entry.addr = reinterpret_cast<uint64_t>(asked->bytes_);
    entry.len = asked->size_;
    entry.off = asked->offset_;
    entry.user_data = reinterpret_cast<uint64_t>(asked);
  }
  Store(tail_, *tail_ + 1);
  ++flying_;
}

int Ring::Now(const Asked& asked) {
  for (;;) {
    const ssize_t done =
        ::pread(asked.fd_, asked.bytes_, asked.size_, static_cast<off_t>(asked.offset_));
    if (done >= 0) return static_cast<int>(done);
    if (errno != EINTR) return -errno;
  }
}

bool Ring::Enter(unsigned at_least) {
  while (!waiting_.empty() && flying_ < kMost && (!held_ || flying_ == 0)) {
    Push(waiting_.front());
    waiting_.pop_front();
    held_ = false;
  }
  return ::syscall(SYS_io_uring_enter, fd_, *tail_ - Load(head_), std::min(at_least, flying_),
                   IORING_ENTER_GETEVENTS, nullptr, 0) >= 0;
}

bool Ring::TakeDone() {
  const unsigned end = Load(done_tail_);
  unsigned at = *done_head_;
  if (at == end) return false;
  for (; at != end; ++at) {
    const io_uring_cqe& done = static_cast<const io_uring_cqe*>(done_)[at & done_mask_];
    auto* asked = reinterpret_cast<Asked*>(done.user_data);
    --flying_;
    held_ = asked && done.res == -EAGAIN;
    if (held_ && flying_ > 0) {
      waiting_.push_back(asked);
    } else if (held_) {  // nothing else is under way: so long others have to wait as well
      asked->Done(Now(*asked));
    } else if (asked) {
      asked->Done(done.res);
    }
  }
  Store(done_head_, at);
  if (!waiting_.empty()) Enter(0);
  return true;
}

#else

std::unique_ptr<Ring> Ring::Open() { return nullptr; }
bool Ring::CanRead(int) { return false; }
Ring::~Ring() = default;
void Ring::Read(int, void*, size_t, uint64_t, Asked*) {}
void Ring::Push(Asked*) {}
bool Ring::Enter(unsigned) { return false; }
bool Ring::TakeDone() { return false; }

#endif

}  // namespace heterps::ps
