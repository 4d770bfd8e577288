#include "row/half.h"

#include <algorithm>
#include <cfloat>
#include <limits>

namespace heterps::ps {
namespace {

typedef uint16_t UnalignedHalf __attribute__((aligned(1), may_alias));

constexpr float kMostScale = 0x1.0204p121f;  // 127 times it is finite

// A NaN among them makes it NaN: such a row must not come back as one of numbers.
float ScaleOf(const UnalignedFloat* from, size_t n) {
  float highest = 0;
  bool numbers = true;
  for (size_t j = 0; j < n; ++j) {
    highest = std::max(highest, std::fabs(from[j]));
    numbers &= from[j] == from[j];
  }
  if (!numbers) return std::numeric_limits<float>::quiet_NaN();
  const float scale = highest / 127.0f;
  if (scale > kMostScale) return kMostScale;
  return scale >= FLT_MIN ? scale : 0;  // a smaller one has no inverse
}

template <typename Round>
void EncodeBytes(const UnalignedFloat* from, size_t n, void* to, Round round) {
  const float scale = ScaleOf(from, n);
  std::memcpy(to, &scale, sizeof(scale));
  auto* out = static_cast<int8_t*>(to) + sizeof(scale);
  if (!(scale > 0)) {
    std::memset(out, 0, n);
    return;
  }
  const float inverse = 1.0f / scale;
  for (size_t j = 0; j < n; ++j) {
    out[j] = static_cast<int8_t>(std::clamp(round(from[j] * inverse, j), -127.0f, 127.0f));
  }
}

}  // namespace

HETERPS_CLONES
void Encode(Dtype dtype, const void* source, size_t n, void* to) {
  const UnalignedFloat* from = static_cast<const UnalignedFloat*>(source);
  UnalignedHalf* out = static_cast<UnalignedHalf*>(to);
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(to, source, n * sizeof(float));
      break;
    case Dtype::kFloat16:
      for (size_t j = 0; j < n; ++j) out[j] = ToFloat16(from[j]);
      break;
    case Dtype::kBfloat16:
      for (size_t j = 0; j < n; ++j) out[j] = ToBfloat16(from[j]);
      break;
    case Dtype::kInt8:
      EncodeBytes(from, n, to, [](float x, size_t) { return std::nearbyint(x); });
      break;
  }
}

void EncodeStochastic(Dtype dtype, const void* source, size_t n, void* to, uint64_t seed) {
  const UnalignedFloat* from = static_cast<const UnalignedFloat*>(source);
  UnalignedHalf* out = static_cast<UnalignedHalf*>(to);
  auto noise = [seed](size_t j) { return static_cast<uint32_t>(Mix(seed + j) >> 32); };
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(to, source, n * sizeof(float));
      break;
    case Dtype::kFloat16:
      for (size_t j = 0; j < n; ++j) out[j] = ToFloat16(from[j], noise(j), false);
      break;
    case Dtype::kBfloat16:
      for (size_t j = 0; j < n; ++j) out[j] = ToBfloat16(from[j], noise(j) & 0xffffu);
      break;
    case Dtype::kInt8:
      EncodeBytes(from, n, to, [&](float x, size_t j) {
        return std::floor(x + static_cast<float>(noise(j) >> 8) * 0x1p-24f);
      });
      break;
  }
}

HETERPS_CLONES
void Decode(Dtype dtype, const void* source, size_t n, void* to) {
  UnalignedFloat* out = static_cast<UnalignedFloat*>(to);
  const UnalignedHalf* half = static_cast<const UnalignedHalf*>(source);
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(to, source, n * sizeof(float));
      break;
    case Dtype::kFloat16:
      for (size_t j = 0; j < n; ++j) out[j] = FromFloat16(half[j]);
      break;
    case Dtype::kBfloat16:
      for (size_t j = 0; j < n; ++j) out[j] = FromBfloat16(half[j]);
      break;
    case Dtype::kInt8: {
      float scale;
      std::memcpy(&scale, source, sizeof(scale));
      const auto* bytes = static_cast<const int8_t*>(source) + sizeof(scale);
      for (size_t j = 0; j < n; ++j) out[j] = scale * static_cast<float>(bytes[j]);
      break;
    }
  }
}

}  // namespace heterps::ps
