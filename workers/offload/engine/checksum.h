// The checksum of zlib, CRC-32, as fast as memory is where the processor multiplies polynomials.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps::offload {

uint32_t Checksum(const char* data, size_t size);

}  // namespace heterps::offload
