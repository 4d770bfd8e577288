#include "heterps/grouped_ffn.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "grouped_ffn_blocks.h"
#include "heterps/gather.h"
#include "instructions.h"
#include "pages.h"
#include "parallel.h"

namespace heterps {
namespace {

constexpr int64_t kMostRows = 192;  // of a block: its hidden rows stay in the second cache
constexpr int64_t kPieces = 8;      // for each thread, so that all end at about the same time
constexpr int64_t kFewestColumns = 64;
// Bytes from which what is given goes past the cache: rows are read soon, gradients of weights are
// not.
constexpr int64_t kMuchOfRows = int64_t{16} << 20;
constexpr int64_t kMuchOfWeights = int64_t{4} << 20;
constexpr int64_t kFewRows = 16;  // over which so few sums are taken that writing is most of them
constexpr int64_t kMostKept = int64_t{16} << 20;  // bytes of scratch that a thread keeps

void check_offsets(const FfnShape& shape, const int64_t* offsets) {
  bool fits = offsets[0] == 0 && offsets[shape.groups] == shape.rows;
  for (int64_t e = 0; e < shape.groups; ++e) fits = fits && offsets[e] <= offsets[e + 1];
  if (!fits) {
    throw std::out_of_range("offsets: expected to ascend from 0 to " + std::to_string(shape.rows) +
                            ", the number of rows");
  }
}

// Blocks of at most kMostRows, even in size inside a group; none of groups without a place.
std::vector<Block> blocks_of(int64_t groups, const int64_t* offsets, bool past,
                             const int64_t* places = nullptr) {
  std::vector<Block> blocks;
  for (int64_t e = 0; e < groups; ++e) {
    if (places != nullptr && places[e] < 0) continue;
    const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
    const int64_t parts = (rows + kMostRows - 1) / kMostRows;
    for (int64_t i = 0; i < parts; ++i) {
      blocks.push_back({e, begin + rows * i / parts, begin + rows * (i + 1) / parts, rows, past});
    }
  }
  for (size_t i = 0; i + 1 < blocks.size(); ++i) blocks[i].next = blocks[i + 1].group;
  return blocks;
}

// A block and some columns of it.
struct Piece {
  int64_t block;
  Columns columns;
};

// Blocks that are too few for so many threads are cut by columns: by rows each part would pack the
// weights anew.
std::vector<Piece> pieces_of(int64_t blocks, int64_t width, int threads) {
  const int64_t most = std::max<int64_t>(1, (width + kFewestColumns - 1) / kFewestColumns);
  const int64_t wanted = blocks > 0 ? (kPieces * threads + blocks - 1) / blocks : 1;
  const int64_t parts = std::min(most, wanted);
  // Of whole lines: two threads do not write the same one.
  const int64_t lines = (width + 15) / 16;
  std::vector<Piece> pieces;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t from = lines * i / parts * 16, to = lines * (i + 1) / parts * 16;
      pieces.push_back({b, {from, std::min(to, width)}});
    }
  }
  return pieces;
}

int64_t rounded(int64_t size) { return (size + 63) / 64 * 64; }

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

// At least one line, aligned to lines.
Memory memory_of(int64_t size) {
  Memory memory(std::aligned_alloc(64, rounded(std::max<int64_t>(size, 1))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// Scratch memory of the calling thread, kept for its next block unless it is much.
class Scratch {
 public:
  explicit Scratch(int64_t size) {
    thread_local Memory memory;
    thread_local int64_t held = 0;
    if (size > kMostKept) {
      own_ = memory_of(size);
      ask_for_huge_pages(own_.get(), size);
      next_ = static_cast<char*>(own_.get());
      return;
    }
    if (size > held) {
      memory.reset();
      held = 0;
      memory = memory_of(size);
      held = size;
    }
    next_ = static_cast<char*>(memory.get());
  }

  // The next so many bytes, in whole lines.
  void* take(int64_t size) {
    char* taken = next_;
    next_ += rounded(size);
    return taken;
  }

 private:
  Memory own_;
  char* next_;
};

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// What is done on so many threads with arrays of one shape and type.
struct Work {
  FfnShape shape;
  DType dtype;
  int threads;
  FfnBlocks kernels;
  int64_t item;   // bytes of an element
  int64_t spare;  // bytes of scratch of a block

  Work(const FfnShape& shape, DType dtype, int threads)
      : shape(shape),
        dtype(dtype),
        threads(threads),
        kernels(HETERPS_OF_THIS_CPU(ffn_blocks)(dtype)),
        item(bytes_of(dtype)),
        spare(rounded(kernels.scratch_bytes(shape, kMostRows))) {}

  // Bytes of so many rows of this width.
  int64_t size(int64_t rows, int64_t width) const { return rounded(rows * width * item); }

  bool much_of_rows() const { return size(shape.rows, shape.dim) >= kMuchOfRows; }
  // Of the gradient of weights that this many rows have.
  bool much_of_weights(int64_t rows) const {
    return rows <= kFewRows || size(shape.groups * shape.dim, shape.inner()) >= kMuchOfWeights;
  }

  template <typename Array>
  Array* at(Array* array, int64_t row, int64_t width) const {
    using Byte = std::conditional_t<std::is_const_v<Array>, const char, char>;
    return array == nullptr ? nullptr : static_cast<Byte*>(array) + row * width * item;
  }

  // Rows begin .. end of `from`, which are gathered into `to` if they come from tokens.
  const void* rows_of(const FfnTokens* tokens, const void* from, bool weighted, int64_t begin,
                      int64_t end, void* to, int on = 1) const {
    if (tokens == nullptr) return at(from, begin, shape.dim);
    gather_rows_cpu({tokens->tokens, end - begin, tokens->k, shape.dim}, dtype, from,
                    weighted ? tokens->weights : nullptr, tokens->order + begin, to, on);
    return to;
  }

  // The gradients of the weights that rows begin .. end were taken with.
  void weights_of(const FfnArrays& arrays, const FfnGradients& gradients, int64_t begin,
                  int64_t end, int on = 1) const {
    if (gradients.weights == nullptr) return;
    const FfnTokens& tokens = *arrays.tokens;
    rows_dot_cpu({tokens.tokens, end - begin, tokens.k, shape.dim}, dtype, gradients.out,
                 at(arrays.out, begin, shape.dim), tokens.order + begin, gradients.weights, on);
  }
};

// A block alone, its arrays beginning with it.
void forward_block(const Work& work, const FfnArrays& arrays, const Block& block) {
  const FfnShape& shape = work.shape;
  const int64_t m = block.end - block.begin;
  const int64_t act_size = rounded(work.kernels.act_bytes(shape, m));
  const int64_t rows_size = arrays.tokens == nullptr ? 0 : work.size(m, shape.dim);
  Scratch scratch(work.spare + act_size + rows_size);
  void* act = scratch.take(act_size);
  FfnArrays own = arrays;
  own.rows = work.rows_of(arrays.tokens, arrays.rows, false, block.begin, block.end,
                          scratch.take(rows_size));
  own.pre = work.at(arrays.pre, block.begin, shape.inner());
  own.out = work.at(arrays.out, block.begin, shape.dim);
  void* spare = scratch.take(work.spare);
  const Block all{block.group, 0, m, block.rows, block.past, block.next};
  work.kernels.first(shape, own, all, {0, shape.hidden}, act, spare);
  work.kernels.second(shape, own, all, {0, shape.dim}, act, spare);
}

// A group alone, so that what its steps give each other stays in the second cache.
void backward_group(const Work& work, const FfnArrays& arrays, const FfnGradients& gradients,
                    int64_t group) {
  const FfnShape& shape = work.shape;
  const int64_t begin = arrays.offsets[group], end = arrays.offsets[group + 1], rows = end - begin;
  const int64_t gathered = arrays.tokens == nullptr ? 0 : work.size(rows, shape.dim);
  const int64_t act = work.size(rows, shape.hidden), pre = work.size(rows, shape.inner());
  Scratch scratch(work.spare + act + pre + 2 * gathered);
  work.weights_of(arrays, gradients, begin, end);
  void* spare = scratch.take(work.spare);
  FfnArrays own = arrays;
  own.act = scratch.take(act);
  own.pre = work.at(arrays.pre, begin, shape.inner());
  own.rows = work.rows_of(arrays.tokens, arrays.rows, false, begin, end, scratch.take(gathered));
  FfnGradients of_own = gradients;
  of_own.pre = scratch.take(pre);
  of_own.out = work.rows_of(arrays.tokens, gradients.out, true, begin, end, scratch.take(gathered));
  of_own.rows = work.at(gradients.rows, begin, shape.dim);
  const int64_t offsets[] = {0, rows};
  for (Block block : blocks_of(1, offsets, work.much_of_rows())) {
    block.group = group;
    work.kernels.backward_first(shape, own, of_own, block, {0, shape.hidden}, spare);
    if (of_own.rows == nullptr) continue;
    work.kernels.backward_second(shape, own, of_own, block, {0, shape.dim}, spare);
  }
  if (gradients.w1 == nullptr) return;
  for (const bool second : {true, false}) {
    const int64_t height = second ? shape.hidden : shape.dim;
    for (int64_t i = 0; i < height; i += kMostRows) {
      Strip strip{
          group, second, i, std::min(height, i + kMostRows), 0, rows, work.much_of_weights(rows)};
      if (!second && strip.to == height && group + 1 < shape.groups) strip.next = group + 1;
      work.kernels.weights(shape, own, of_own, strip, spare);
    }
  }
}

// Whether groups are many and even enough to be shared out whole.
bool by_groups(const Work& work, const int64_t* offsets) {
  int64_t largest = 0;
  for (int64_t e = 0; e < work.shape.groups; ++e) {
    largest = std::max(largest, offsets[e + 1] - offsets[e]);
  }
  return work.threads == 1 || largest * 2 * work.threads <= work.shape.rows;
}

}  // namespace

void grouped_ffn_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays, int threads) {
  check_offsets(shape, arrays.offsets);
  const Work work(shape, dtype, threads);
  const FfnBlocks& kernels = work.kernels;
  ask_for_huge_pages(arrays.out, work.size(shape.rows, shape.dim));
  ask_for_huge_pages(arrays.pre, work.size(shape.rows, shape.inner()));
  const std::vector<Block> blocks =
      blocks_of(shape.groups, arrays.offsets, work.much_of_rows(), arrays.places);
  const int64_t count = static_cast<int64_t>(blocks.size());
  if (count >= kPieces * threads || threads == 1) {
    parallel_for(count, threads, [&](int64_t i) { forward_block(work, arrays, blocks[i]); });
    return;
  }
  const Memory act = memory_of(kernels.act_bytes(shape, shape.rows));
  const Memory gathered =
      memory_of(arrays.tokens == nullptr ? 0 : work.size(shape.rows, shape.dim));
  FfnArrays own = arrays;
  own.rows =
      work.rows_of(arrays.tokens, arrays.rows, false, 0, shape.rows, gathered.get(), threads);
  const auto of_block = [&](const Block& block) {
    return static_cast<char*>(act.get()) + kernels.act_bytes(shape, block.begin);
  };
  const std::vector<Piece> units = pieces_of(count, shape.hidden, threads);
  parallel_for(static_cast<int64_t>(units.size()), threads, [&](int64_t i) {
    const Block& block = blocks[units[i].block];
    Scratch scratch(work.spare);
    kernels.first(shape, own, block, units[i].columns, of_block(block), scratch.take(work.spare));
  });
  const std::vector<Piece> columns = pieces_of(count, shape.dim, threads);
  parallel_for(static_cast<int64_t>(columns.size()), threads, [&](int64_t i) {
    const Block& block = blocks[columns[i].block];
    Scratch scratch(work.spare);
    kernels.second(shape, own, block, columns[i].columns, of_block(block),
                   scratch.take(work.spare));
  });
}

void grouped_ffn_backward_cpu(const FfnShape& shape, DType dtype, const FfnArrays& arrays,
                              const FfnGradients& gradients, int threads) {
  check_offsets(shape, arrays.offsets);
  const Work work(shape, dtype, threads);
  const FfnBlocks& kernels = work.kernels;
  ask_for_huge_pages(gradients.rows, work.size(shape.rows, shape.dim));
  ask_for_huge_pages(gradients.w1, work.size(shape.groups * shape.dim, shape.inner()));
  ask_for_huge_pages(gradients.w2, work.size(shape.groups * shape.hidden, shape.dim));
  if (by_groups(work, arrays.offsets)) {
    parallel_for(shape.groups, threads,
                 [&](int64_t e) { backward_group(work, arrays, gradients, e); });
    return;
  }
  work.weights_of(arrays, gradients, 0, shape.rows, threads);
  const Memory act = memory_of(work.size(shape.rows, shape.hidden));
  const Memory pre = memory_of(work.size(shape.rows, shape.inner()));
  const int64_t gathered = arrays.tokens == nullptr ? 0 : work.size(shape.rows, shape.dim);
  const Memory rows = memory_of(gathered), out = memory_of(gathered);
  FfnArrays own = arrays;
  own.act = act.get();
  own.rows = work.rows_of(arrays.tokens, arrays.rows, false, 0, shape.rows, rows.get(), threads);
  FfnGradients of_own = gradients;
  of_own.pre = pre.get();
  of_own.out = work.rows_of(arrays.tokens, gradients.out, true, 0, shape.rows, out.get(), threads);
  const std::vector<Block> blocks = blocks_of(shape.groups, arrays.offsets, work.much_of_rows());
  const int64_t count = static_cast<int64_t>(blocks.size());
  const std::vector<Piece> units = pieces_of(count, shape.hidden, threads);
  parallel_for(static_cast<int64_t>(units.size()), threads, [&](int64_t i) {
    Scratch scratch(work.spare);
    kernels.backward_first(shape, own, of_own, blocks[units[i].block], units[i].columns,
                           scratch.take(work.spare));
  });
  if (gradients.rows != nullptr) {
    const std::vector<Piece> columns = pieces_of(count, shape.dim, threads);
    parallel_for(static_cast<int64_t>(columns.size()), threads, [&](int64_t i) {
      Scratch scratch(work.spare);
      kernels.backward_second(shape, own, of_own, blocks[columns[i].block], columns[i].columns,
                              scratch.take(work.spare));
    });
  }
  if (gradients.w1 == nullptr) return;
  std::vector<Strip> strips;
  for (int64_t e = 0; e < shape.groups; ++e) {
    for (const bool second : {false, true}) {
      const int64_t height = second ? shape.hidden : shape.dim;
      for (int64_t i = 0; i < height; i += kMostRows) {
        const int64_t begin = arrays.offsets[e], end = arrays.offsets[e + 1];
        strips.push_back({e, second, i, std::min(height, i + kMostRows), begin, end,
                          work.much_of_weights(end - begin)});
      }
    }
  }
  parallel_for(static_cast<int64_t>(strips.size()), threads, [&](int64_t i) {
    Scratch scratch(work.spare);
    kernels.weights(shape, own, of_own, strips[i], scratch.take(work.spare));
  });
}

}  // namespace heterps
