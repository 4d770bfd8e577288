// Element types that cross the border between the library and its callers.
#pragma once

namespace heterps {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16 };

}  // namespace heterps
