// What grouped_ffn does on a CPU for one block of rows: one table of functions for each instruction
// set and element type.
#pragma once

#include "heterps/grouped_ffn.h"

namespace heterps {

// Some rows of one group.
struct Block {
  int64_t group;
  int64_t begin;
  int64_t end;
};

// `spare` is scratch memory of scratch_bytes() for blocks of so many rows, aligned to 64 bytes.
struct FfnBlocks {
  int64_t (*scratch_bytes)(const FfnShape& shape, int64_t rows);
  void (*forward)(const FfnShape& shape, const FfnArrays& arrays, const Block& block, void* spare);
  // The gradients of pre and rows, and the activations once more.
  void (*backward)(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                   const Block& block, void* spare);
  // Rows block.begin .. block.end of the gradient of one group's w1 or w2.
  void (*weights)(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                  bool second, const Block& block, void* spare);
};

FfnBlocks ffn_blocks_portable(DType dtype);
FfnBlocks ffn_blocks_avx2(DType dtype);
FfnBlocks ffn_blocks_avx512(DType dtype);

}  // namespace heterps
