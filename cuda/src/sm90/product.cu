// One product, by what the build defines: a kind, a type and a tile. One takes a minute and
// gigabytes to compile.
#include "product.cuh"

namespace heterps {

template size_t product_workspace<ProductKind::HETERPS_KIND, cutlass::HETERPS_TYPE, HETERPS_TILE>(
    int64_t, int);
template void run_product<ProductKind::HETERPS_KIND, cutlass::HETERPS_TYPE, HETERPS_TILE>(
    int64_t, const GroupArrays&, void*, int, void*);

}  // namespace heterps
