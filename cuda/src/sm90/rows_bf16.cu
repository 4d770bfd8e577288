#include "product.cuh"

namespace heterps {

template size_t product_workspace<ProductKind::kRows, cutlass::bfloat16_t>(int64_t, int);
template void run_product<ProductKind::kRows, cutlass::bfloat16_t>(int64_t, const GroupArrays&,
                                                                   void*, int, void*);

}  // namespace heterps
