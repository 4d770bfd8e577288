#include "heterps/linear.h"

#include <algorithm>
#include <vector>

#include "grouped_ffn_blocks.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;            // of a piece
constexpr int64_t kMostOutputs = 512;         // of a piece that is summed over all rows
constexpr int64_t kFewRows = 16;              // below which weights are not packed
constexpr int64_t kPanel = 32;                // columns that are packed together
constexpr int64_t kFewOutputs = 16;           // below which most of a panel would be empty
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

// Calls work(begin, end, from, to) for pieces of rows begin .. end, at most so many, and columns
// from .. to, as many as there are threads worth it: by columns as far as that goes, since for each
// piece the columns are packed anew.
template <typename Work>
void for_pieces(int64_t rows, int64_t most, int64_t columns, int64_t depth, int threads,
                const Work& work) {
  const int64_t worth =
      std::clamp<int64_t>(rows * columns * depth / kGrain, 1, static_cast<int64_t>(threads));
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t across = std::max<int64_t>(1, std::min(worth, panels));
  const int64_t down = std::max((rows + most - 1) / most,
                                std::min(worth / across, (rows + kFewRows - 1) / kFewRows));
  parallel_for(across * down, threads, [&](int64_t i) {
    const int64_t r = i / across, c = i % across;
    work(rows * r / down, rows * (r + 1) / down, panels * c / across * kPanel,
         std::min(columns, panels * (c + 1) / across * kPanel));
  });
}

}  // namespace

void linear_forward_cpu(const LinearShape& shape, const float* x, const float* weight,
                        const float* bias, float* y, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  const bool few = rows < kFewRows || outputs < kFewOutputs;
  for_pieces(rows, kMostRows, outputs, inputs, threads,
             [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
               const Spare spare(kernels, end - begin);
               float* out = y + begin * outputs + from;
               kernels.product({end - begin, to - from, inputs, x + begin * inputs, inputs, 1,
                                weight + from * inputs, 1, inputs, out, outputs, few},
                               spare.product());
               if (bias == nullptr) return;
               for (int64_t row = begin; row < end; ++row, out += outputs) {
                 for (int64_t i = from; i < to; ++i) out[i - from] += bias[i];
               }
             });
}

void linear_grad_input_cpu(const LinearShape& shape, const float* grad, const float* weight,
                           float* grad_x, bool add, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  for_pieces(rows, kMostRows, inputs, outputs, threads,
             [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
               const int64_t width = to - from;
               const Spare spare(kernels, end - begin, add ? width : 0);
               float* out = grad_x + begin * inputs + from;
               float* sums = add ? spare.rows() : out;
               kernels.product({end - begin, width, outputs, grad + begin * outputs, outputs, 1,
                                weight + from, inputs, 1, sums, add ? width : inputs, false},
                               spare.product());
               if (!add) return;
               for (int64_t row = begin; row < end; ++row, out += inputs, sums += width) {
                 for (int64_t i = 0; i < width; ++i) out[i] += sums[i];
               }
             });
}

void linear_grad_weight_cpu(const LinearShape& shape, const float* grad, const float* x,
                            float* grad_weight, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  const FfnBlocks kernels = ffn_blocks_of_this_cpu(DType::kFloat32);
  for_pieces(outputs, kMostOutputs, inputs, rows, threads,
             [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
               const Spare spare(kernels, end - begin);
               kernels.product({end - begin, to - from, rows, grad + begin, 1, outputs, x + from,
                                inputs, 1, grad_weight + begin * inputs + from, inputs, false},
                               spare.product());
             });
}

}  // namespace heterps
