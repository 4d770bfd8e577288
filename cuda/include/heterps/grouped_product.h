// One matrix product for each group of consecutive rows, on GPUs of capability 9.0: by CUTLASS,
// where it was there when this was built (src/sm90/).
#pragma once

#include <cstdint>

#include "heterps/dtype.h"

namespace heterps {

enum class ProductKind {
  kRows,        // out[rows, width] = left[rows, depth] right[e], right being [groups, depth, width]
  kTransposed,  // the same with right [groups, width, depth]
  kWeights,     // out[e] = left^T right over the rows of e: [groups, depth, width] from left
                // [rows, depth] and right [rows, width]
};

// Of all groups together, as the host knows it.
struct ProductSize {
  int64_t groups;
  int64_t rows;
  int64_t depth;  // as ProductKind has it
};

// The products of the groups, in memory of the device: out is [m, n], summed over k; pitches are
// elements between rows of a matrix as it lies in memory.
struct GroupArrays {
  int32_t* shapes;  // [groups, 3]: m, n, k; m is 0 where there is nothing to do
  const void** left;
  const void** right;
  void** out;
  int64_t* left_pitch;
  int64_t* right_pitch;
  int64_t* out_pitch;
};

// Whether these were built in; bytes of scratch that one needs on the current device; enqueues it
// on `stream`. float16 and bfloat16; matrices begin at multiples of 16 bytes, and so do their rows.
// Throws std::runtime_error.
bool has_products_sm90();
int64_t product_workspace_sm90(int64_t groups);
void product_sm90(ProductKind kind, DType dtype, const ProductSize& size, const GroupArrays& arrays,
                  void* workspace, void* stream);

}  // namespace heterps
