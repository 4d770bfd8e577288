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
  int64_t rows;       // of the whole group
  bool past;          // what it gives goes past the cache, as there is much of it
  int64_t next = -1;  // the group of the block after this one; -1: none
};

// Some rows of the gradient of one group's w1 or w2, and the rows that it is summed over.
struct Strip {
  int64_t group;
  bool second;  // of w2
  int64_t from;
  int64_t to;
  int64_t begin;
  int64_t end;
  bool past;          // as of a block
  int64_t next = -1;  // the group whose backward comes after this strip; -1: none
};

// Some columns of what a product gives.
struct Columns {
  int64_t from;
  int64_t to;
};

// `spare` is scratch memory of scratch_bytes() for blocks of so many rows, aligned to 64 bytes.
// Forward and backward have two steps: the first gives hidden units, the second columns of D. The
// second needs all of the first for its rows, in `act`: [rows of the block, H] in the type of sums,
// of the backward that of the arrays.
struct FfnBlocks {
  int64_t (*scratch_bytes)(const FfnShape& shape, int64_t rows);
  int64_t (*act_bytes)(const FfnShape& shape, int64_t rows);
  void (*first)(const FfnShape& shape, const FfnArrays& arrays, const Block& block,
                const Columns& units, void* act, void* spare);
  void (*second)(const FfnShape& shape, const FfnArrays& arrays, const Block& block,
                 const Columns& columns, const void* act, void* spare);
  // The gradients of pre, and the activations once more; then those of rows.
  void (*backward_first)(const FfnShape& shape, const FfnArrays& arrays,
                         const FfnGradients& gradients, const Block& block, const Columns& units,
                         void* spare);
  void (*backward_second)(const FfnShape& shape, const FfnArrays& arrays,
                          const FfnGradients& gradients, const Block& block, const Columns& columns,
                          void* spare);
  void (*weights)(const FfnShape& shape, const FfnArrays& arrays, const FfnGradients& gradients,
                  const Strip& strip, void* spare);
};

FfnBlocks ffn_blocks_portable(DType dtype);
FfnBlocks ffn_blocks_avx2(DType dtype);
FfnBlocks ffn_blocks_avx512(DType dtype);

}  // namespace heterps
