#include "grouped_ffn_kernels.h"

namespace heterps {

FfnBlocks ffn_blocks_avx2(DType dtype) { return blocks_for<Tiling<32, 6>>(dtype); }

}  // namespace heterps
