#include "checksum.h"

#include <array>

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

}  // namespace

uint32_t Checksum(const char* data, size_t size) {
  auto* bytes = reinterpret_cast<const uint8_t*>(data);
  uint32_t sum = ~0u;
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint8_t mixed = i < 4 ? bytes[i] ^ static_cast<uint8_t>(sum >> (8 * i)) : bytes[i];
      next ^= kTables[kSlices - 1 - i][mixed];
    }
    sum = next;
  }
  for (; size > 0; --size, ++bytes) sum = (sum >> 8) ^ kTables[0][(sum ^ *bytes) & 0xFF];
  return ~sum;
}

}  // namespace heterps::offload
