// In the place of src/sm90/products.cu: the grouped products of Hopper, which are CUTLASS's, from
// what the kernels have told of each group. Nothing of CUTLASS runs here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <vector>

#include "device.h"
#include "heterps/grouped_product.h"

namespace heterps {
namespace {

constexpr int64_t kScratch = 256;  // of which a product needs none

template <typename T>
void run(ProductKind kind, int64_t groups, const GroupArrays& arrays) {
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t m = arrays.shapes[3 * e], n = arrays.shapes[3 * e + 1];
    const int64_t k = arrays.shapes[3 * e + 2];
    if (m == 0) continue;
    if (n <= 0 || k <= 0) throw std::runtime_error("grouped product: expected n and k from 1 on");
    const int64_t a = arrays.left_pitch[e], b = arrays.right_pitch[e], d = arrays.out_pitch[e];
    const auto* left = static_cast<const T*>(arrays.left[e]);
    const auto* right = static_cast<const T*>(arrays.right[e]);
    auto* out = static_cast<T*>(arrays.out[e]);
    for (const void* pointer :
         {arrays.left[e], arrays.right[e], const_cast<const void*>(arrays.out[e])}) {
      if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0 || (a | b | d) % 8 != 0) {
        throw std::runtime_error("grouped product: expected operands that TMA can read");
      }
    }
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          const T x = left[kind == ProductKind::kWeights ? l * a + i : i * a + l];
          const T y = right[kind == ProductKind::kTransposed ? j * b + l : l * b + j];
          sum += static_cast<float>(x) * static_cast<float>(y);
        }
        out[i * d + j] = static_cast<T>(sum);
      }
    }
  }
}

}  // namespace

bool has_products_sm90() { return true; }

int64_t product_workspace_sm90(int64_t) { return kScratch; }

void product_sm90(ProductKind kind, DType dtype, const ProductSize& size, const GroupArrays& arrays,
                  void*, void*) {
  emulate::enqueue([=, groups = size.groups] {
    if (dtype == DType::kFloat16) {
      run<__half>(kind, groups, arrays);
    } else {
      run<__nv_bfloat16>(kind, groups, arrays);
    }
  });
}

}  // namespace heterps
