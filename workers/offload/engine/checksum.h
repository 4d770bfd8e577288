// The checksum of zlib, sixteen bytes at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heterps::offload {

uint32_t Checksum(const char* data, size_t size);

}  // namespace heterps::offload
