#include "table/reads.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "table/hash.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HETERPS_HAS_URING 1
#endif

namespace heterps::ps {

namespace {

constexpr size_t kKept = 4;               // blocks of a thread
constexpr size_t kKeptBytes = 256 << 10;  // of each, at most

struct Kept {
  std::array<char*, kKept> bytes{};
  std::array<size_t, kKept> align{}, size{};
  ~Kept() {
    for (char* block : bytes) std::free(block);
  }
};

Kept& Mine() {
  thread_local Kept kept;
  return kept;
}

}  // namespace

void FreeBlock::operator()(char* bytes) const {
  Kept& kept = Mine();
  for (size_t i = 0; size <= kKeptBytes && i < kKept; ++i) {
    if (kept.bytes[i]) continue;
    kept.bytes[i] = bytes, kept.align[i] = align, kept.size[i] = size;
    return;
  }
  std::free(bytes);
}

Block BlockOf(size_t align, size_t bytes) {
  Kept& kept = Mine();
  for (size_t i = 0; i < kKept; ++i) {
    const bool fits = bytes <= kept.size[i] && kept.size[i] / 4 <= bytes;
    if (!kept.bytes[i] || kept.align[i] % align || !fits) continue;
    return {std::exchange(kept.bytes[i], nullptr), {kept.align[i], kept.size[i]}};
  }
  const size_t size = std::bit_ceil(std::max(bytes, align));
  Block out(static_cast<char*>(std::aligned_alloc(align, size)), {align, size});
  if (!out) throw std::bad_alloc();
  return out;
}

size_t Fetched::SpanOf(const One& one) const {
  const uint64_t begin = one.offset / align_ * align_;
  return (one.offset + one.size - begin + align_ - 1) / align_ * align_;
}

uint32_t* Fetched::Entry(uint32_t slot) {
  const size_t mask = places_.size() - 1;
  size_t at = Mix(slot) & mask;
  while (places_[at] && all_[places_[at] - 1].slot != slot) at = (at + 1) & mask;
  return &places_[at];
}

void Fetched::Add(uint32_t slot, uint32_t version, size_t size, uint64_t offset) {
  if (2 * all_.size() >= places_.size()) {
    places_.assign(std::max<size_t>(64, 2 * places_.size()), 0);
    for (size_t i = 0; i < all_.size(); ++i) *Entry(all_[i].slot) = static_cast<uint32_t>(i + 1);
  }
  uint32_t* entry = Entry(slot);
  if (*entry) return;
  all_.push_back({this, offset, static_cast<uint32_t>(size), slot, version, nullptr});
  *entry = static_cast<uint32_t>(all_.size());
}

const char* Fetched::Find(uint32_t slot, uint32_t version) const {
  if (all_.empty()) return nullptr;
  const uint32_t at = *Entry(slot);
  if (at == 0) return nullptr;
  const One& one = all_[at - 1];
  return one.whole && one.version == version ? one.record : nullptr;
}

void Fetched::Begin() {
  size_t total = 0;
  for (const One& one : all_) total += SpanOf(one);
  if (total == 0) return;
  bytes_ = BlockOf(align_, total);
  char* to = bytes_.get();
  for (One& one : all_) {
    const uint64_t begin = one.offset / align_ * align_;
    one.record = to + (one.offset - begin);
    ++left_;
    reads_->Push(fd_, to, SpanOf(one), begin, &one);
    to += SpanOf(one);
  }
  reads_->Enter(0);
}

// Whatever the system answers, what was handed over is its own until it is done.
void Fetched::Wait() {
  while (left_ > 0) {
    if (!reads_->TakeDone()) reads_->Enter(static_cast<unsigned>(left_));
  }
}

void Fetched::One::Done(int read) {
  // What failed is read again by whoever needs it, who can say why.
  whole = read >= 0 && static_cast<uint64_t>(read) >= offset % of->align_ + size;
  --of->left_;
}

#ifdef HETERPS_HAS_URING

namespace {

constexpr unsigned kEntries = 256;        // handed over at once
constexpr unsigned kDone = 4 * kEntries;  // of those that are done; the kernel keeps what is beyond

unsigned Load(unsigned* from) { return std::atomic_ref(*from).load(std::memory_order_acquire); }
void Store(unsigned* to, unsigned value) {
  std::atomic_ref(*to).store(value, std::memory_order_release);
}

}  // namespace

std::unique_ptr<Reads> Reads::Open() {
  io_uring_params params{};
  params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
  params.cq_entries = kDone;
  std::unique_ptr<Reads> out(new Reads);
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
  out->Push(-1, nullptr, 0, 0, nullptr);  // nothing: whether it may also be used
  if (!out->Enter(1) || !out->TakeDone()) return nullptr;
  return out;
}

Reads::~Reads() {
  if (queue_) ::munmap(queue_, queue_bytes_);
  if (entries_) ::munmap(entries_, entry_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void Reads::Push(int fd, void* to, size_t size, uint64_t offset, void* what) {
  while (*tail_ - Load(head_) == room_) {
    if (!TakeDone()) Enter(0);
  }
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[*tail_ & mask_];
  entry = {};
  entry.opcode = fd < 0 ? IORING_OP_NOP : IORING_OP_READ;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(to);
  entry.len = static_cast<uint32_t>(size);
  entry.off = offset;
  entry.user_data = reinterpret_cast<uint64_t>(what);
  Store(tail_, *tail_ + 1);
}

bool Reads::Enter(unsigned at_least) {
  return ::syscall(SYS_io_uring_enter, fd_, *tail_ - Load(head_), at_least, IORING_ENTER_GETEVENTS,
                   nullptr, 0) >= 0;
}

bool Reads::TakeDone() {
  const unsigned end = Load(done_tail_);
  unsigned at = *done_head_;
  if (at == end) return false;
  for (; at != end; ++at) {
    const io_uring_cqe& done = static_cast<const io_uring_cqe*>(done_)[at & done_mask_];
    if (done.user_data) reinterpret_cast<Fetched::One*>(done.user_data)->Done(done.res);
  }
  Store(done_head_, at);
  return true;
}

#else

std::unique_ptr<Reads> Reads::Open() { return nullptr; }
Reads::~Reads() = default;
void Reads::Push(int, void*, size_t, uint64_t, void*) {}
bool Reads::Enter(unsigned) { return false; }
bool Reads::TakeDone() { return false; }

#endif

}  // namespace heterps::ps
