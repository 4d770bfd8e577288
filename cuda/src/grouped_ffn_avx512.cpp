#include "grouped_ffn_kernels.h"

namespace heterps {

FfnBlocks ffn_blocks_avx512(DType dtype) { return blocks_for<Tiling<64, 12>>(dtype); }

}  // namespace heterps
