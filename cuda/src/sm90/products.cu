#include <algorithm>
#include <initializer_list>
#include <stdexcept>

#include "../check.cuh"
#include "products.h"

namespace heterps {
namespace {

int processors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "grouped product: device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "grouped product: device");
  return count;
}

template <typename T, typename Tiling>
size_t workspace_of(int64_t groups, int processors) {
  return std::max({product_workspace<ProductKind::kRows, T, Tiling>(groups, processors),
                   product_workspace<ProductKind::kTransposed, T, Tiling>(groups, processors),
                   product_workspace<ProductKind::kWeights, T, Tiling>(groups, processors)});
}

template <typename T>
size_t workspace_of(int64_t groups, int processors) {
  return std::max(workspace_of<T, Cooperative>(groups, processors),
                  workspace_of<T, Pingpong>(groups, processors));
}

// Whether storing in turns is worth smaller tiles: with many rows of a group it is (up to 10 % on
// an H200), but for sums so long that what is loaded counts (a third slower).
bool in_turns(ProductKind kind, const ProductSize& size) {
  if (kind == ProductKind::kWeights) return size.rows >= 512 * size.groups;
  return size.rows >= 1024 * size.groups && size.depth <= 4096;
}

template <ProductKind kKind, typename T>
void run(const ProductSize& size, const GroupArrays& arrays, void* workspace, void* stream) {
  if (in_turns(kKind, size)) {
    return run_product<kKind, T, Pingpong>(size.groups, arrays, workspace, processors(), stream);
  }
  run_product<kKind, T, Cooperative>(size.groups, arrays, workspace, processors(), stream);
}

template <typename T>
void run(ProductKind kind, const ProductSize& size, const GroupArrays& arrays, void* workspace,
         void* stream) {
  switch (kind) {
    case ProductKind::kRows:
      return run<ProductKind::kRows, T>(size, arrays, workspace, stream);
    case ProductKind::kTransposed:
      return run<ProductKind::kTransposed, T>(size, arrays, workspace, stream);
    case ProductKind::kWeights:
      return run<ProductKind::kWeights, T>(size, arrays, workspace, stream);
  }
}

}  // namespace

bool has_products_sm90() { return true; }

int64_t product_workspace_sm90(int64_t groups) {
  const int count = processors();
  return static_cast<int64_t>(std::max(workspace_of<cutlass::bfloat16_t>(groups, count),
                                       workspace_of<cutlass::half_t>(groups, count)));
}

void product_sm90(ProductKind kind, DType dtype, const ProductSize& size, const GroupArrays& arrays,
                  void* workspace, void* stream) {
  if (dtype == DType::kBFloat16) {
    run<cutlass::bfloat16_t>(kind, size, arrays, workspace, stream);
  } else if (dtype == DType::kFloat16) {
    run<cutlass::half_t>(kind, size, arrays, workspace, stream);
  } else {
    throw std::runtime_error("grouped product: expected float16 or bfloat16");
  }
}

}  // namespace heterps
