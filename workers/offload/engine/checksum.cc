#include "checksum.h"

#include <array>

#if defined(__x86_64__) && defined(__GNUC__)
#define HETERPS_FOLDS 1
#include <immintrin.h>
#endif

namespace heterps::offload {
namespace {

constexpr size_t kSlices = 16;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b]: of byte b with k zeros behind it.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t sum = b;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0xEDB88320u : 0);
    tables[0][b] = sum;
  }
  for (size_t k = 1; k < kSlices; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      const uint32_t before = tables[k - 1][b];
      tables[k][b] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

// What comes of `sum` by these bytes.
uint32_t Continue(uint32_t sum, const uint8_t* bytes, size_t size) {
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint8_t mixed = i < 4 ? bytes[i] ^ static_cast<uint8_t>(sum >> (8 * i)) : bytes[i];
      next ^= kTables[kSlices - 1 - i][mixed];
    }
    sum = next;
  }
  for (; size > 0; --size, ++bytes) sum = (sum >> 8) ^ kTables[0][(sum ^ *bytes) & 0xFF];
  return sum;
}

#ifdef HETERPS_FOLDS

constexpr size_t kWide = 16, kAtOnce = 4 * kWide;

// A remainder of 16 bytes, moved over as many bytes as the constants are for, and those there.
__attribute__((target("pclmul,sse2"))) inline __m128i Fold(__m128i sum, __m128i over,
                                                           const uint8_t* there) {
  const __m128i low = _mm_clmulepi64_si128(sum, over, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, over, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(there)));
}

// The same as Continue, by products of polynomials: Gopal and others, "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ" (2009). At least 64 bytes, and a multiple of 16.
__attribute__((target("pclmul,sse2"))) uint32_t Folded(uint32_t sum, const uint8_t* bytes,
                                                       size_t size) {
  const __m128i over_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i over_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i sums[4];
  for (size_t i = 0; i < 4; ++i) {
    sums[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i * kWide));
  }
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(sum)));
  for (bytes += kAtOnce, size -= kAtOnce; size >= kAtOnce; bytes += kAtOnce, size -= kAtOnce) {
    for (size_t i = 0; i < 4; ++i) sums[i] = Fold(sums[i], over_four, bytes + i * kWide);
  }
  __m128i one = sums[0];
  alignas(kWide) std::array<uint8_t, kWide> last;
  for (size_t i = 1; i < 4; ++i) {
    _mm_store_si128(reinterpret_cast<__m128i*>(last.data()), sums[i]);
    one = Fold(one, over_one, last.data());
  }
  for (; size > 0; bytes += kWide, size -= kWide) one = Fold(one, over_one, bytes);
  _mm_store_si128(reinterpret_cast<__m128i*>(last.data()), one);
  return Continue(0, last.data(), kWide);
}

#endif

}  // namespace

uint32_t Checksum(const char* data, size_t size) {
  auto* bytes = reinterpret_cast<const uint8_t*>(data);
  uint32_t sum = ~0u;
#ifdef HETERPS_FOLDS
  static const bool folds = __builtin_cpu_supports("pclmul");
  if (folds && size >= kAtOnce) {
    const size_t most = size / kWide * kWide;
    sum = Folded(sum, bytes, most);
    bytes += most, size -= most;
  }
#endif
  return ~Continue(sum, bytes, size);
}

}  // namespace heterps::offload
