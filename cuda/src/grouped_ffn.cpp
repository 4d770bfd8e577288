#include "heterps/grouped_ffn.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "grouped_ffn_blocks.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;  // of a block: its hidden rows stay in the second cache
constexpr int64_t kFewestRows = 24;

void check_offsets(const FfnShape& shape, const int64_t* offsets) {
  bool fits = offsets[0] == 0 && offsets[shape.groups] == shape.rows;
  for (int64_t e = 0; e < shape.groups; ++e) fits = fits && offsets[e] <= offsets[e + 1];
  if (!fits) {
    throw std::out_of_range("offsets: expected to ascend from 0 to " + std::to_string(shape.rows) +
                            ", the number of rows");
  }
}

// Blocks of at most `most` rows, even in size inside a group; none of groups without a place.
std::vector<Block> blocks_of(int64_t groups, const int64_t* offsets, int64_t most,
                             const int64_t* places = nullptr) {
  std::vector<Block> blocks;
  for (int64_t e = 0; e < groups; ++e) {
    if (places != nullptr && places[e] < 0) continue;
    const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
    const int64_t parts = (rows + most - 1) / most;
    for (int64_t i = 0; i < parts; ++i) {
      blocks.push_back({e, begin + rows * i / parts, begin + rows * (i + 1) / parts});
    }
  }
  return blocks;
}

int64_t rows_of_block(int64_t rows, int threads) {
  return std::clamp(rows / (4 * threads), kFewestRows, kMostRows);
}

// Scratch memory of the calling thread, kept for its next block.
void* scratch(int64_t size) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t held = 0;
  const size_t bytes = (static_cast<size_t>(size) + 63) / 64 * 64;
  if (bytes > held) {
    memory.reset();
    held = 0;
    memory.reset(std::aligned_alloc(64, bytes));
    if (!memory) throw std::bad_alloc();
    held = bytes;
  }
  return memory.get();
}

FfnBlocks blocks_of_this_cpu(DType dtype) {
#ifdef HETERPS_X86_KERNELS
  static const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512) return ffn_blocks_avx512(dtype);
  if (avx2) return ffn_blocks_avx2(dtype);
#endif
  return ffn_blocks_portable(dtype);
}

}  // namespace

void grouped_ffn_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays, int threads) {
  check_offsets(shape, arrays.offsets);
  const FfnBlocks kernels = blocks_of_this_cpu(dtype);
  const int64_t most = rows_of_block(shape.rows, threads);
  const int64_t bytes = kernels.scratch_bytes(shape, most);
  const std::vector<Block> blocks = blocks_of(shape.groups, arrays.offsets, most, arrays.places);
  parallel_for(static_cast<int64_t>(blocks.size()), threads,
               [&](int64_t i) { kernels.forward(shape, arrays, blocks[i], scratch(bytes)); });
}

void grouped_ffn_backward_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                              const FfnGradients& gradients, int threads) {
  check_offsets(shape, arrays.offsets);
  const FfnBlocks kernels = blocks_of_this_cpu(dtype);
  const int64_t most = rows_of_block(shape.rows, threads);
  const int64_t bytes = kernels.scratch_bytes(shape, kMostRows);
  const std::vector<Block> blocks = blocks_of(shape.groups, arrays.offsets, most);
  parallel_for(static_cast<int64_t>(blocks.size()), threads, [&](int64_t i) {
    kernels.backward(shape, arrays, gradients, blocks[i], scratch(bytes));
  });
  if (gradients.w1 == nullptr) return;
  // Of each group the rows of w1, then those of w2.
  std::vector<Block> parts;
  for (int64_t e = 0; e < 2 * shape.groups; ++e) {
    const int64_t height = e % 2 == 0 ? shape.dim : shape.hidden;
    for (int64_t i = 0; i < height; i += kMostRows) {
      parts.push_back({e, i, std::min(height, i + kMostRows)});
    }
  }
  parallel_for(static_cast<int64_t>(parts.size()), threads, [&](int64_t i) {
    const Block part{parts[i].group / 2, parts[i].begin, parts[i].end};
    kernels.weights(shape, arrays, gradients, parts[i].group % 2 == 1, part, scratch(bytes));
  });
}

}  // namespace heterps
