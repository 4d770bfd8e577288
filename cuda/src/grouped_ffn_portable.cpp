#include "grouped_ffn_kernels.h"

namespace heterps {

FfnBlocks ffn_blocks_portable(DType dtype) { return blocks_for<Tiling<16, 4>>(dtype); }

}  // namespace heterps
