// Large arrays in huge pages: to touch memory for the first time costs the kernel as much as many a
// product, and a fifth of that in pages of 2 MiB. As numpy does.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace heterps {

// Asks for it; what has pages already keeps them, and so does a system without any.
inline void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kLeast = int64_t{4} << 20;
  if (data == nullptr || bytes < kLeast) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace heterps
