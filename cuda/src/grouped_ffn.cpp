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
constexpr int64_t kPieces = 8;      // for each thread, so that all end at about the same time
constexpr int64_t kFewestColumns = 64;

void check_offsets(const FfnShape& shape, const int64_t* offsets) {
  bool fits = offsets[0] == 0 && offsets[shape.groups] == shape.rows;
  for (int64_t e = 0; e < shape.groups; ++e) fits = fits && offsets[e] <= offsets[e + 1];
  if (!fits) {
    throw std::out_of_range("offsets: expected to ascend from 0 to " + std::to_string(shape.rows) +
                            ", the number of rows");
  }
}

// Blocks of at most kMostRows, even in size inside a group; none of groups without a place.
std::vector<Block> blocks_of(int64_t groups, const int64_t* offsets,
                             const int64_t* places = nullptr) {
  std::vector<Block> blocks;
  for (int64_t e = 0; e < groups; ++e) {
    if (places != nullptr && places[e] < 0) continue;
    const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
    const int64_t parts = (rows + kMostRows - 1) / kMostRows;
    for (int64_t i = 0; i < parts; ++i) {
      blocks.push_back({e, begin + rows * i / parts, begin + rows * (i + 1) / parts});
    }
  }
  for (size_t i = 0; i + 1 < blocks.size(); ++i) blocks[i].next = blocks[i + 1].group;
  return blocks;
}

// A block and some columns of it.
struct Piece {
  int64_t block;
  Columns columns;
};

// Blocks that are too few for so many threads are cut by columns: by rows each part would pack the
// weights anew.
std::vector<Piece> pieces_of(int64_t blocks, int64_t width, int threads) {
  const int64_t most = std::max<int64_t>(1, (width + kFewestColumns - 1) / kFewestColumns);
  const int64_t wanted = blocks > 0 ? (kPieces * threads + blocks - 1) / blocks : 1;
  const int64_t parts = std::min(most, wanted);
  // Of whole lines: two threads do not write the same one.
  const int64_t lines = (width + 15) / 16;
  std::vector<Piece> pieces;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t from = lines * i / parts * 16, to = lines * (i + 1) / parts * 16;
      pieces.push_back({b, {from, std::min(to, width)}});
    }
  }
  return pieces;
}

int64_t rounded(int64_t size) { return (size + 63) / 64 * 64; }

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

// At least one line, aligned to lines.
Memory memory_of(int64_t size) {
  Memory memory(std::aligned_alloc(64, rounded(std::max<int64_t>(size, 1))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// Scratch memory of the calling thread, kept for its next block.
void* scratch(int64_t size) {
  thread_local Memory memory;
  thread_local int64_t held = 0;
  if (size > held) {
    memory.reset();
    held = 0;
    memory = memory_of(size);
    held = size;
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
  const int64_t bytes = kernels.scratch_bytes(shape, kMostRows);
  const std::vector<Block> blocks = blocks_of(shape.groups, arrays.offsets, arrays.places);
  const int64_t count = static_cast<int64_t>(blocks.size());
  if (count >= kPieces * threads || threads == 1) {
    const int64_t act = rounded(kernels.act_bytes(shape, kMostRows));
    parallel_for(count, threads, [&](int64_t i) {
      char* memory = static_cast<char*>(scratch(act + bytes));
      kernels.first(shape, arrays, blocks[i], {0, shape.hidden}, memory, memory + act);
      kernels.second(shape, arrays, blocks[i], {0, shape.dim}, memory, memory + act);
    });
    return;
  }
  const Memory act = memory_of(kernels.act_bytes(shape, shape.rows));
  const auto of_block = [&](const Block& block) {
    return static_cast<char*>(act.get()) + kernels.act_bytes(shape, block.begin);
  };
  const std::vector<Piece> units = pieces_of(count, shape.hidden, threads);
  parallel_for(static_cast<int64_t>(units.size()), threads, [&](int64_t i) {
    const Block& block = blocks[units[i].block];
    kernels.first(shape, arrays, block, units[i].columns, of_block(block), scratch(bytes));
  });
  const std::vector<Piece> columns = pieces_of(count, shape.dim, threads);
  parallel_for(static_cast<int64_t>(columns.size()), threads, [&](int64_t i) {
    const Block& block = blocks[columns[i].block];
    kernels.second(shape, arrays, block, columns[i].columns, of_block(block), scratch(bytes));
  });
}

void grouped_ffn_backward_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                              const FfnGradients& gradients, int threads) {
  check_offsets(shape, arrays.offsets);
  const FfnBlocks kernels = blocks_of_this_cpu(dtype);
  const int64_t bytes = kernels.scratch_bytes(shape, kMostRows);
  const std::vector<Block> blocks = blocks_of(shape.groups, arrays.offsets);
  const int64_t count = static_cast<int64_t>(blocks.size());
  const std::vector<Piece> units = pieces_of(count, shape.hidden, threads);
  parallel_for(static_cast<int64_t>(units.size()), threads, [&](int64_t i) {
    kernels.backward_first(shape, arrays, gradients, blocks[units[i].block], units[i].columns,
                           scratch(bytes));
  });
  if (gradients.rows != nullptr) {
    const std::vector<Piece> columns = pieces_of(count, shape.dim, threads);
    parallel_for(static_cast<int64_t>(columns.size()), threads, [&](int64_t i) {
      kernels.backward_second(shape, arrays, gradients, blocks[columns[i].block],
                              columns[i].columns, scratch(bytes));
    });
  }
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
