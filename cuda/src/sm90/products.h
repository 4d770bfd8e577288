// The instantiations of Product, of which each is a file of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heterps/grouped_product.h"

namespace cutlass {
struct half_t;
struct bfloat16_t;
}  // namespace cutlass

namespace heterps {

template <ProductKind kKind, typename T>
size_t product_workspace(int64_t groups, int processors);

template <ProductKind kKind, typename T>
void run_product(int64_t groups, const GroupArrays& arrays, void* workspace, int processors,
                 void* stream);

}  // namespace heterps
