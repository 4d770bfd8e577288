// Memory and places of a file for reads and writes past the page cache (O_DIRECT), which are of
// whole blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace heterps::ps {

// A thread keeps some memory for its next ones: what malloc would keep of so many sizes is more
// than they take.
struct FreeBlock {
  size_t align = 0, size = 0;
  void operator()(char* bytes) const;
};
using Block = std::unique_ptr<char, FreeBlock>;
Block BlockOf(size_t align, size_t bytes);

// The whole blocks of which some bytes of a file are part.
struct Span {
  uint64_t begin;
  size_t size;

  uint64_t end() const { return begin + size; }
};
inline Span Around(uint64_t offset, size_t size, size_t block) {
  const uint64_t begin = offset / block * block;
  return {begin, (offset - begin + size + block - 1) / block * block};
}

}  // namespace heterps::ps
