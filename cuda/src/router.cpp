#include "heterps/router.h"

#include <algorithm>
#include <vector>

#include "grouped_ffn_blocks.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;            // of a piece
constexpr int64_t kFewRows = 16;              // below which weights are not packed
constexpr int64_t kPanel = 32;                // columns that are packed together
constexpr int64_t kFewExperts = 16;           // below which most of a panel would be empty
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

// Calls work(begin, end, from, to) for pieces of rows begin .. end and columns from .. to, as many
// as there are threads worth it: by columns as far as that goes, since for each piece the columns
// are packed anew.
template <typename Work>
void for_pieces(int64_t rows, int64_t columns, int64_t depth, int threads, const Work& work) {
  const int64_t worth =
      std::clamp<int64_t>(rows * columns * depth / kGrain, 1, static_cast<int64_t>(threads));
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t across = std::max<int64_t>(1, std::min(worth, panels));
  const int64_t down = std::max((rows + kMostRows - 1) / kMostRows,
                                std::min(worth / across, (rows + kFewRows - 1) / kFewRows));
  parallel_for(across * down, threads, [&](int64_t i) {
    const int64_t r = i / across, c = i % across;
    work(rows * r / down, rows * (r + 1) / down, panels * c / across * kPanel,
         std::min(columns, panels * (c + 1) / across * kPanel));
  });
}

}  // namespace

void router_logits_cpu(const RouterShape& shape, const float* x, const float* weight,
                       const float* bias, float* logits, int threads) {
  const int64_t tokens = shape.tokens, dim = shape.dim, experts = shape.experts;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  const bool few = tokens < kFewRows || experts < kFewExperts;
  for_pieces(tokens, experts, dim, threads,
             [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
               const Spare spare(kernels, end - begin);
               float* out = logits + begin * experts + from;
               kernels.product({end - begin, to - from, dim, x + begin * dim, dim, 1,
                                weight + from * dim, 1, dim, out, experts, few},
                               spare.product());
               if (bias == nullptr) return;
               for (int64_t t = begin; t < end; ++t, out += experts) {
                 for (int64_t e = from; e < to; ++e) out[e - from] += bias[e];
               }
             });
}

void router_backward_cpu(const RouterShape& shape, const float* grad, const float* x,
                         const float* weight, const RouterGradients& gradients, int threads) {
  const int64_t tokens = shape.tokens, dim = shape.dim, experts = shape.experts;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  if (gradients.x != nullptr) {
    for_pieces(tokens, dim, experts, threads,
               [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
                 const int64_t width = to - from;
                 const Spare spare(kernels, end - begin, width);
                 kernels.product({end - begin, width, experts, grad + begin * experts, experts, 1,
                                  weight + from, dim, 1, spare.rows(), width, false},
                                 spare.product());
                 const float* sums = spare.rows();
                 for (int64_t t = begin; t < end; ++t, sums += width) {
                   float* out = gradients.x + t * dim + from;
                   for (int64_t d = 0; d < width; ++d) out[d] += sums[d];
                 }
               });
  }
  if (gradients.weight == nullptr) return;
  for_pieces(experts, dim, tokens, threads,
             [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
               const Spare spare(kernels, end - begin);
               kernels.product({end - begin, to - from, tokens, grad + begin, 1, experts, x + from,
                                dim, 1, gradients.weight + begin * dim + from, dim, false},
                               spare.product());
             });
}

}  // namespace heterps
