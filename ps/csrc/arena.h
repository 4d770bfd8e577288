// Memory of one table, in large chunks on huge pages: rows are read at random, and a missing
// page-table entry costs as much as a missing cache line.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace heterps::ps {

// Thread-safe. Blocks are aligned to 64 bytes, not zeroed, and not resident before they are
// touched. All end with the arena.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* Allocate(size_t bytes);
  // Its pages return to the system; its place serves the next block of that size.
  void Free(void* block, size_t bytes);

 private:
  struct Release {
    size_t mapped = 0;  // bytes; 0: of malloc
    void operator()(char* p) const;
  };
  using Chunk = std::unique_ptr<char, Release>;
  static Chunk Map(size_t bytes);

  std::mutex mutex_;
  std::vector<Chunk> chunks_;
  std::map<size_t, std::vector<void*>> free_;  // by size
  char* next_ = nullptr;
  size_t left_ = 0;
  size_t total_ = 0;
};

}  // namespace heterps::ps
