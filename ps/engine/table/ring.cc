#include "table/ring.h"

#include <algorithm>
#include <atomic>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HETERPS_HAS_URING 1
#endif

namespace heterps::ps {

#ifdef HETERPS_HAS_URING

namespace {

constexpr unsigned kEntries = 256;        // handed over at once
constexpr unsigned kDone = 4 * kEntries;  // of those that are done; the kernel keeps what is beyond

unsigned Load(unsigned* from) { return std::atomic_ref(*from).load(std::memory_order_acquire); }
void Store(unsigned* to, unsigned value) {
  std::atomic_ref(*to).store(value, std::memory_order_release);
}

}  // namespace

std::unique_ptr<Ring> Ring::Open() {
  io_uring_params params{};
  params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
  params.cq_entries = kDone;
  std::unique_ptr<Ring> out(new Ring);
  out->fd_ = static_cast<int>(::syscall(SYS_io_uring_setup, kEntries, &params));
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
  out->room_ = params.sq_entries;
  out->head_ = at(params.sq_off.head), out->tail_ = at(params.sq_off.tail);
  out->mask_ = *at(params.sq_off.ring_mask);
  out->done_head_ = at(params.cq_off.head), out->done_tail_ = at(params.cq_off.tail);
  out->done_mask_ = *at(params.cq_off.ring_mask);
  out->done_ = at(params.cq_off.cqes);
  for (unsigned i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
  out->Push(What::kNothing, -1, nullptr, 0, 0, nullptr);  // whether it may also be used
  if (!out->Enter(1) || !out->TakeDone()) return nullptr;
  return out;
}

Ring::~Ring() {
  if (queue_) ::munmap(queue_, queue_bytes_);
  if (entries_) ::munmap(entries_, entry_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void Ring::Push(What what, int fd, void* bytes, size_t size, uint64_t offset, Asked* asked) {
  while (*tail_ - Load(head_) == room_) {
    if (!TakeDone()) Enter(0);
  }
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[*tail_ & mask_];
  entry = {};
  entry.opcode = what == What::kRead ? IORING_OP_READ : IORING_OP_NOP;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(bytes);
  entry.len = static_cast<uint32_t>(size);
  entry.off = offset;
  entry.user_data = reinterpret_cast<uint64_t>(asked);
  Store(tail_, *tail_ + 1);
}

bool Ring::Enter(unsigned at_least) {
  return ::syscall(SYS_io_uring_enter, fd_, *tail_ - Load(head_), at_least, IORING_ENTER_GETEVENTS,
                   nullptr, 0) >= 0;
}

bool Ring::TakeDone() {
  const unsigned end = Load(done_tail_);
  unsigned at = *done_head_;
  if (at == end) return false;
  for (; at != end; ++at) {
    const io_uring_cqe& done = static_cast<const io_uring_cqe*>(done_)[at & done_mask_];
    if (done.user_data) reinterpret_cast<Asked*>(done.user_data)->Done(done.res);
  }
  Store(done_head_, at);
  return true;
}

#else

std::unique_ptr<Ring> Ring::Open() { return nullptr; }
Ring::~Ring() = default;
void Ring::Push(What, int, void*, size_t, uint64_t, Asked*) {}
bool Ring::Enter(unsigned) { return false; }
bool Ring::TakeDone() { return false; }

#endif

}  // namespace heterps::ps
