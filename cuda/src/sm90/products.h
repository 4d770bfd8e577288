// The instantiations of Product, each compiled on its own (product.cu).
#pragma once

#include <cstddef>
#include <cstdint>

#include "heterps/grouped_product.h"

namespace cutlass {
struct half_t;
struct bfloat16_t;
}  // namespace cutlass

namespace heterps {

// Tiles of 128 x 256 by two groups of warps together, where little is loaded for what is
// multiplied.
struct Cooperative;
// Tiles of 128 x 128 by two groups of warps in turns: one multiplies while the other stores.
struct Pingpong;

template <ProductKind kKind, typename T, typename Tiling>
size_t product_workspace(int64_t groups, int processors);

template <ProductKind kKind, typename T, typename Tiling>
void run_product(int64_t groups, const GroupArrays& arrays, void* workspace, int processors,
                 void* stream);

}  // namespace heterps
