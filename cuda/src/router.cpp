#include "heterps/router.h"

#include <algorithm>
#include <vector>

#include "grouped_ffn_blocks.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;            // of a block, as of experts
constexpr int64_t kFewestRows = 16;           // for which the weights are packed
constexpr int64_t kFewestColumns = 64;        // for which the gradients are
constexpr int64_t kGrain = int64_t{1} << 17;  // products that are worth a thread

// Scratch memory of the calling thread.
class Spare {
 public:
  // For products of so many rows, and as many rows of `width` beside them.
  explicit Spare(const FfnBlocks& kernels, int64_t rows, int64_t width = 0) {
    thread_local std::vector<float> memory;
    const FfnShape shape{rows, 1, 0, 0, Activation::kRelu};  // sums lie where they are written
    const size_t product = kernels.scratch_bytes(shape, rows) / sizeof(float);
    const size_t size = product + static_cast<size_t>(rows * width);
    if (memory.size() < size) memory.resize(size);
    product_ = memory.data();
    rows_ = product_ + product;
  }

  float* product() const { return product_; }
  float* rows() const { return rows_; }

 private:
  float* product_;
  float* rows_;
};

// Parts of `size`, none smaller than `least` where there are several, for so many threads.
int64_t parts_of(int64_t size, int64_t least, int64_t products, int threads) {
  const int64_t worth = std::min<int64_t>(threads, products / kGrain);
  return std::max<int64_t>(1, std::min(worth, size / least));
}

// Calls work(begin, end) for blocks of tokens.
template <typename Work>
void for_blocks(const RouterShape& shape, int threads, const Work& work) {
  const int64_t products = shape.tokens * shape.dim * shape.experts;
  const int64_t parts = std::max((shape.tokens + kMostRows - 1) / kMostRows,
                                 parts_of(shape.tokens, kFewestRows, products, threads));
  parallel_for(parts, threads,
               [&](int64_t i) { work(shape.tokens * i / parts, shape.tokens * (i + 1) / parts); });
}

}  // namespace

void router_logits_cpu(const RouterShape& shape, const float* x, const float* weight,
                       const float* bias, float* logits, int threads) {
  const auto [tokens, dim, experts] = shape;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  for_blocks(shape, threads,
             [&, dim = dim, experts = experts, tokens = tokens](int64_t begin, int64_t end) {
               const Spare spare(kernels, end - begin);
               float* to = logits + begin * experts;
               kernels.product({end - begin, experts, dim, x + begin * dim, dim, 1, weight, 1, dim,
                                to, experts, tokens < kFewestRows},
                               spare.product());
               if (bias == nullptr) return;
               for (int64_t i = 0; i < (end - begin) * experts; ++i) to[i] += bias[i % experts];
             });
}

void router_backward_cpu(const RouterShape& shape, const float* grad, const float* x,
                         const float* weight, const RouterGradients& gradients, int threads) {
  const int64_t tokens = shape.tokens, dim = shape.dim, experts = shape.experts;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  if (gradients.x != nullptr) {
    for_blocks(shape, threads, [&](int64_t begin, int64_t end) {
      const Spare spare(kernels, end - begin, dim);
      kernels.product({end - begin, dim, experts, grad + begin * experts, experts, 1, weight, dim,
                       1, spare.rows(), dim, false},
                      spare.product());
      float* to = gradients.x + begin * dim;
      for (int64_t i = 0; i < (end - begin) * dim; ++i) to[i] += spare.rows()[i];
    });
  }
  if (gradients.weight == nullptr) return;
  const int64_t parts = parts_of(dim, kFewestColumns, tokens * dim * experts, threads);
  const int64_t lines = (dim + 15) / 16;
  parallel_for(parts, threads, [&](int64_t i) {
    const int64_t begin = lines * i / parts * 16, end = std::min(dim, lines * (i + 1) / parts * 16);
    const Spare spare(kernels, experts);
    kernels.product({experts, end - begin, tokens, grad, 1, experts, x + begin, dim, 1,
                     gradients.weight + begin, dim, false},
                    spare.product());
  });
}

}  // namespace heterps
