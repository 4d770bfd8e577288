#include "row/initializer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bindings/platform.h"
#include "table/hash.h"

namespace heterps::ps {
namespace {

// Element j comes from Mix(base + j): counter-based, so no state passes between elements.
void Uniform(uint64_t base, float scale, size_t dim, UnalignedFloat* out) {
  for (size_t j = 0; j < dim; ++j) {
    const auto bits = static_cast<int32_t>(Mix(base + j) >> 40);  // 24 bits, exact in float32
    out[j] = (static_cast<float>(bits) * 0x1p-23f - 1.0f) * scale;
  }
}

// Box-Muller in double, two values a draw, rounded once.
void Normal(uint64_t base, double scale, size_t dim, UnalignedFloat* out) {
  for (size_t j = 0; j < dim; j += 2) {
    const uint64_t bits = Mix(base + j);
    const double u = (static_cast<double>(bits >> 32) + 1.0) * 0x1p-32;  // (0, 1]
    const double v = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;  // [0, 1)
    const double radius = scale * std::sqrt(-2.0 * std::log(u));
    const double angle = 6.283185307179586 * v;
    out[j] = static_cast<float>(radius * std::cos(angle));
    if (j + 1 < dim) out[j + 1] = static_cast<float>(radius * std::sin(angle));
  }
}

}  // namespace

void Initializer::Fill(uint64_t key, size_t dim, void* out) const {
  const uint64_t base = Mix(Mix(seed) ^ key);
  UnalignedFloat* values = static_cast<UnalignedFloat*>(out);
  switch (kind) {
    case Kind::kZeros:
      std::memset(out, 0, dim * sizeof(float));
      break;
    case Kind::kUniform:
      Uniform(base, static_cast<float>(scale), dim, values);
      break;
    case Kind::kNormal:
      Normal(base, scale, dim, values);
      break;
  }
}

}  // namespace heterps::ps
