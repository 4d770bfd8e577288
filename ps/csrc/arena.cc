#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace heterps::ps {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHuge = 2 << 20;
constexpr size_t kFirstChunk = 256 << 10;  // tables may be small, and many
constexpr size_t kMostChunk = 64 << 20;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

void Arena::Release::operator()(char* p) const { std::free(p); }

void* Arena::Allocate(size_t bytes) {
  bytes = RoundUp(std::max<size_t>(bytes, 1), kLine);
  std::lock_guard lock(mutex_);
  const auto found = free_.find(bytes);
  if (found != free_.end() && !found->second.empty()) {
    void* block = found->second.back();
    found->second.pop_back();
    return block;
  }
  if (bytes > left_) {
    // A quarter of what there is: few chunks, and little of the last one in vain.
    size_t size = std::max(bytes, std::clamp(total_ / 4, kFirstChunk, kMostChunk));
    const bool huge = size >= 2 * kHuge;
    if (huge) size = RoundUp(size, kHuge);
    void* memory = nullptr;
    if (::posix_memalign(&memory, huge ? kHuge : kLine, size) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge) ::madvise(memory, size, MADV_HUGEPAGE);
#endif
    chunks_.emplace_back(static_cast<char*>(memory));
    next_ = chunks_.back().get();
    left_ = size;
    total_ += size;
  }
  void* block = next_;
  next_ += bytes;
  left_ -= bytes;
  return block;
}

void Arena::Free(void* block, size_t bytes) {
  bytes = RoundUp(std::max<size_t>(bytes, 1), kLine);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(block);
  const uintptr_t first = RoundUp(begin, page);
  const uintptr_t last = (begin + bytes) / page * page;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::lock_guard lock(mutex_);
  free_[bytes].push_back(block);
}

}  // namespace heterps::ps
