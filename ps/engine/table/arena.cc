#include "table/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>

namespace heterps::ps {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHuge = 2 << 20;
constexpr size_t kFirstChunk = 256 << 10;  // tables may be small, and many
constexpr size_t kMostChunk = 64 << 20;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

void Arena::Release::operator()(char* p) const {
  if (mapped) {
    ::munmap(p, mapped);
  } else {
    std::free(p);
  }
}

// On its own, not from malloc: what a chunk has not used yet is then not resident, and blocks of
// malloc do not lie between chunks.
Arena::Chunk Arena::Map(size_t bytes) const {
  void* found =
      ::mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  char* const whole = static_cast<char*>(found);
  const auto address = reinterpret_cast<uintptr_t>(whole);
  const size_t before = RoundUp(address, kHuge) - address;
  char* const begin = whole + before;
  if (before) ::munmap(whole, before);
  ::munmap(begin + bytes, kHuge - before);
#ifdef MADV_HUGEPAGE
  ::madvise(begin, bytes, large_ ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  return Chunk(begin, Release{bytes});
}

void* Arena::Allocate(size_t bytes) {
  bytes = RoundUp(std::max<size_t>(bytes, 1), kLine);
  std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [block, size] = *it;
    if (size < bytes) continue;
    it = free_.erase(it);
    if (size > bytes) free_.emplace_hint(it, block + bytes, size - bytes);
    return block;
  }
  if (bytes > left_) {
    // As much as there is: few chunks. What of the last one is not used is not resident either.
    size_t size = std::max(bytes, std::clamp(total_, kFirstChunk, kMostChunk));
    if (left_) Insert(next_, left_);
    if (size >= 2 * kHuge) {
      size = RoundUp(size, kHuge);
      chunks_.push_back(Map(size));
    } else {
      void* memory = nullptr;
      if (::posix_memalign(&memory, kLine, size) != 0) throw std::bad_alloc();
      chunks_.emplace_back(static_cast<char*>(memory));
    }
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
  if (returns_ && last > first) {
    ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  std::lock_guard lock(mutex_);
  Insert(static_cast<char*>(block), bytes);
}

void Arena::Insert(char* block, size_t bytes) {
  const auto after = free_.lower_bound(block);
  if (after != free_.end() && block + bytes == after->first) {
    bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(block);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == block) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace_hint(next, block, bytes);
}

}  // namespace heterps::ps
