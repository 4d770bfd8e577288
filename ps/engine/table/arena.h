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
  // `returns`: the pages of what is freed go back to the system, which takes large pages apart. Not
  // for an owner that will soon need them again.
  // `large`: pages are, and so what is resident may be much more than what was touched.
  explicit Arena(bool returns, bool large = true) : returns_(returns), large_(large) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* Allocate(size_t bytes);
  // Its place, with free neighbours, serves later blocks.
  void Free(void* block, size_t bytes);

 private:
  struct Release {
    size_t mapped = 0;  // bytes; 0: of malloc
    void operator()(char* p) const;
  };
  using Chunk = std::unique_ptr<char, Release>;
  Chunk Map(size_t bytes) const;
  void Insert(char* block, size_t bytes);

  const bool returns_, large_;
  std::mutex mutex_;
  std::vector<Chunk> chunks_;
  std::map<char*, size_t> free_;  // no two are neighbours
  char* next_ = nullptr;
  size_t left_ = 0;
  size_t total_ = 0;
};

}  // namespace heterps::ps
