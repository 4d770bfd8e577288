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

template <typename T>
size_t workspace_of(int64_t groups, int processors) {
  return std::max({product_workspace<ProductKind::kRows, T>(groups, processors),
                   product_workspace<ProductKind::kTransposed, T>(groups, processors),
                   product_workspace<ProductKind::kWeights, T>(groups, processors)});
}

template <typename T>
void run(ProductKind kind, int64_t groups, const GroupArrays& arrays, void* workspace,
         void* stream) {
  switch (kind) {
    case ProductKind::kRows:
      return run_product<ProductKind::kRows, T>(groups, arrays, workspace, processors(), stream);
    case ProductKind::kTransposed:
      return run_product<ProductKind::kTransposed, T>(groups, arrays, workspace, processors(),
                                                      stream);
    case ProductKind::kWeights:
      return run_product<ProductKind::kWeights, T>(groups, arrays, workspace, processors(), stream);
  }
}

}  // namespace

bool has_products_sm90() { return true; }

int64_t product_workspace_sm90(int64_t groups) {
  const int count = processors();
  return static_cast<int64_t>(std::max(workspace_of<cutlass::bfloat16_t>(groups, count),
                                       workspace_of<cutlass::half_t>(groups, count)));
}

void product_sm90(ProductKind kind, DType dtype, int64_t groups, const GroupArrays& arrays,
                  void* workspace, void* stream) {
  if (dtype == DType::kBFloat16) {
    run<cutlass::bfloat16_t>(kind, groups, arrays, workspace, stream);
  } else if (dtype == DType::kFloat16) {
    run<cutlass::half_t>(kind, groups, arrays, workspace, stream);
  } else {
    throw std::runtime_error("grouped product: expected float16 or bfloat16");
  }
}

}  // namespace heterps
