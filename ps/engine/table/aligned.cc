#include "table/aligned.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

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

}  // namespace heterps::ps
