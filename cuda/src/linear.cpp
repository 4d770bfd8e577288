#include "heterps/linear.h"

#include <algorithm>
#include <vector>

#include "instructions.h"
#include "linear_blocks.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;            // of a piece, where packed columns are not kept
constexpr int64_t kMostOutputs = 512;         // of a piece that is summed over all rows
constexpr int64_t kMostColumns = 2048;        // of a piece, packed
constexpr int64_t kFewRows = 16;              // below which weights are not packed
constexpr int64_t kPanel = 32;                // columns that are packed together
constexpr int64_t kFewOutputs = 16;           // below which most of a panel would be empty
constexpr int64_t kFewDeep = 4;               // up to which a sum is in memory, not in registers
constexpr int64_t kLarge = 128;               // rows and columns from which both are packed
constexpr int64_t kGrain = int64_t{1} << 17;  // products that are worth a thread

// Scratch memory of the calling thread, aligned to 64 bytes: of what was asked for last.
float* spare(int64_t bytes) {
  thread_local std::vector<float> memory;
  constexpr size_t kAlignment = 64 / sizeof(float);
  const size_t size = static_cast<size_t>(bytes) / sizeof(float) + kAlignment;
  if (memory.size() < size) memory.resize(size);
  const size_t past = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % kAlignment;
  return memory.data() + (past == 0 ? 0 : kAlignment - past);
}

// How many pieces there are of rows and of columns.
struct Pieces {
  int64_t down;
  int64_t across;
};

int64_t parts(int64_t size, int64_t most) { return std::max<int64_t>(1, (size + most - 1) / most); }

// As many as there are threads worth it. What is packed is so for each piece anew.
Pieces pieces_of(const LinearProduct& p, LinearWay way, int64_t most, int threads) {
  const int64_t worth =
      std::clamp<int64_t>(p.m * p.n * p.depth / kGrain, 1, static_cast<int64_t>(threads));
  const int64_t panels = parts(p.n, kPanel);
  if (!is_packed(way)) {  // but for columns: by them as far as that goes
    const int64_t across = std::min(worth, panels);
    return {std::max(parts(p.m, most), std::min(worth / across, parts(p.m, kFewRows))), across};
  }
  Pieces best{1, 1};
  int64_t least = -1;
  for (int64_t down = 1; down <= std::min(worth, parts(p.m, kFewRows)); ++down) {
    const int64_t across = std::min(panels, std::max(worth / down, parts(p.n, kMostColumns)));
    // Of the largest piece, what it multiplies and what it packs, which takes longer for each.
    const int64_t m = parts(p.m, down), n = parts(panels, across) * kPanel;
    const int64_t cost = m * n + 16 * (m + n);
    if (least >= 0 && cost >= least) continue;
    least = cost;
    best = {down, across};
  }
  return best;
}

// The whole product, in pieces. `add`: to what is there.
void compute(const LinearProduct& whole, LinearWay way, int64_t most, bool add, int threads) {
  const LinearBlocks blocks = HETERPS_OF_THIS_CPU(linear_blocks)();
  const auto [down, across] = pieces_of(whole, way, most, threads);
  const int64_t panels = parts(whole.n, kPanel);
  parallel_for(down * across, threads, [&, down = down, across = across](int64_t i) {
    const int64_t r = i / across, c = i % across;
    const int64_t begin = whole.m * r / down, end = whole.m * (r + 1) / down;
    const int64_t from = panels * c / across * kPanel;
    const int64_t to = std::min(whole.n, panels * (c + 1) / across * kPanel);
    LinearProduct piece = whole;
    piece.m = end - begin, piece.n = to - from;
    piece.a += begin * whole.a_row, piece.b += from * whole.b_column;
    if (whole.bias != nullptr) piece.bias += from;
    if (whole.rectified != nullptr) piece.rectified += begin * whole.width + from;
    float* out = whole.to + begin * whole.width + from;
    const int64_t scratch = blocks.scratch_bytes(piece, way, whole.m);
    float* memory = spare(scratch + (add ? piece.m * piece.n * int64_t{sizeof(float)} : 0));
    float* sums = memory + scratch / static_cast<int64_t>(sizeof(float));
    piece.to = add ? sums : out;
    if (add) piece.width = piece.n;
    blocks.product(piece, way, whole.m, memory);
    if (!add) return;
    for (int64_t row = 0; row < piece.m; ++row, out += whole.width, sums += piece.n) {
      for (int64_t j = 0; j < piece.n; ++j) out[j] += sums[j];
    }
  });
}

bool is_large(int64_t rows, int64_t columns, int64_t depth) {
  return std::min(rows, columns) >= kLarge && depth > 0;
}

}  // namespace

void linear_forward_cpu(const LinearShape& shape, const float* x, const float* weight,
                        const float* bias, bool relu, float* y, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  const bool few = rows < kFewRows || outputs < kFewOutputs;
  compute({rows, outputs, inputs, x, inputs, 1, weight, 1, inputs, y, outputs, bias, relu},
          few                               ? LinearWay::kDots
          : is_large(rows, outputs, inputs) ? LinearWay::kPackedByRows
                                            : LinearWay::kInPlace,
          kMostRows, false, threads);
}

void linear_grad_input_cpu(const LinearShape& shape, const float* grad, const float* weight,
                           const float* rectified, float* grad_x, bool add, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  const bool shallow = outputs > 0 && outputs <= kFewDeep;
  const bool packed = !add && is_large(rows, inputs, outputs);
  compute({rows, inputs, outputs, grad, outputs, 1, weight, inputs, 1, grad_x, inputs, nullptr,
           false, rectified},
          shallow  ? LinearWay::kShallow
          : packed ? LinearWay::kPackedByRows
                   : LinearWay::kInPlace,
          kMostRows, add, threads);
}

void linear_grad_weight_cpu(const LinearShape& shape, const float* grad, const float* x,
                            float* grad_weight, int threads) {
  const int64_t rows = shape.rows, inputs = shape.inputs, outputs = shape.outputs;
  compute({outputs, inputs, rows, grad, 1, outputs, x, inputs, 1, grad_weight, inputs},
          !is_large(outputs, inputs, rows) ? LinearWay::kInPlace
          : outputs > kMostOutputs         ? LinearWay::kPackedByRows
                                           : LinearWay::kPackedByColumns,
          kMostOutputs, false, threads);
}

}  // namespace heterps
