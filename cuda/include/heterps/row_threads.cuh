// How the threads of a block share out rows: a power of two of them has each row, and goes through
// its elements together. So nobody divides to find its row, which in 64 bits takes some hundred
// instructions.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace heterps {

constexpr int kRowThreads = 256;  // of a block

struct RowThreads {
  unsigned blocks;
  int bits;  // 2^bits threads have a row
};

// For rows of `width` elements, which is at least 1; of an `op`, for the error.
inline RowThreads row_threads(int64_t rows, int64_t width, const char* op) {
  int bits = 0;
  while ((1 << bits) < kRowThreads && (1 << bits) < width) ++bits;
  const int64_t rows_in_block = kRowThreads >> bits;
  const int64_t blocks = (rows + rows_in_block - 1) / rows_in_block;
  if (blocks > INT32_MAX)
    throw std::runtime_error(std::string(op) + ": too many rows for one launch");
  return {static_cast<unsigned>(blocks), bits};
}

// The row of this thread, which may lie behind the last, and which of the row's threads it is.
__device__ inline int64_t row_of_thread(int bits) {
  return (int64_t{blockIdx.x} << (8 - bits)) + (threadIdx.x >> bits);
}
__device__ inline int64_t thread_of_row(int bits) { return threadIdx.x & ((1u << bits) - 1); }
static_assert(kRowThreads == 1 << 8);

// a / b of numbers from 0 on: mostly both fit into 32 bits.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 != 0) return a / b;
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

}  // namespace heterps
