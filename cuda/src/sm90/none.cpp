// In the place of products.cu in a build without CUTLASS.
#include <stdexcept>

#include "heterps/grouped_product.h"

namespace heterps {

bool has_products_sm90() { return false; }

int64_t product_workspace_sm90(int64_t) { return 0; }

void product_sm90(ProductKind, DType, const ProductSize&, const GroupArrays&, void*, void*) {
  throw std::runtime_error(
      "grouped product: this build has none for Hopper: it was made without CUTLASS");
}

}  // namespace heterps
