#include "row/layout.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace heterps::ps {
namespace {

constexpr size_t kChunk = 256;  // encoded rows that are decoded, updated and encoded at a time

size_t RoundUp(size_t bytes) { return (bytes + 3) / 4 * 4; }

const char* Columns(const void* values, const Segment& segment) {
  return static_cast<const char*>(values) + segment.column * sizeof(float);
}

}  // namespace

Layout::Layout(std::vector<Segment> segments, Dtype dtype, bool stochastic)
    : segments_(std::move(segments)), dtype_(dtype), stochastic_(stochastic) {
  if (segments_.empty()) throw std::invalid_argument("a row needs a segment");
  for (Segment& segment : segments_) {
    if (segment.dim == 0) throw std::invalid_argument("dim must be at least 1");
    segment.optimizer.Prepare();
    segment.state_width = segment.optimizer.StateWidth(segment.dim);
    segment.column = dim_;
    dim_ += segment.dim;
  }
  size_t at = 0;
  auto place = [&](bool lazy) {
    for (Segment& segment : segments_) {
      if ((segment.lazy > 0) != lazy) continue;
      segment.weights_at = at;
      segment.state_at = at + RoundUp(EncodedBytes(dtype_, segment.dim));
      at = segment.state_at + segment.state_width * sizeof(float);
    }
  };
  place(false);
  narrow_bytes_ = at;
  place(true);
  full_bytes_ = at;
  has_lazy_ = full_bytes_ > narrow_bytes_;
  if (narrow_bytes_ == 0) throw std::invalid_argument("a row needs a segment that is not lazy");
  for (const Segment& segment : segments_) {
    if (segment.lazy > 0 && (lazy_from_ == 0 || segment.lazy < lazy_from_)) {
      lazy_from_ = segment.lazy;
    }
  }
  plain_ = segments_.size() == 1 && dtype_ == Dtype::kFloat32;
}

void Layout::InitSegment(const Segment& segment, uint64_t key, char* row) const {
  // Segments of one row must not begin alike.
  const uint64_t salted = segment.column == 0 ? key : Mix(key + segment.column);
  if (dtype_ == Dtype::kFloat32) {
    segment.initializer.Fill(salted, segment.dim, row + segment.weights_at);
  } else {
    auto values = std::make_unique_for_overwrite<float[]>(segment.dim);
    segment.initializer.Fill(salted, segment.dim, values.get());
    Encode(dtype_, values.get(), segment.dim, row + segment.weights_at);
  }
  segment.optimizer.InitState(segment.dim, reinterpret_cast<float*>(row + segment.state_at));
}

void Layout::Init(uint64_t key, bool full, char* row) const {
  for (const Segment& segment : segments_) {
    if (full || segment.lazy == 0) InitSegment(segment, key, row);
  }
}

void Layout::Widen(uint64_t key, char* row) const {
  for (const Segment& segment : segments_) {
    if (segment.lazy > 0) InitSegment(segment, key, row);
  }
}

void Layout::ReadSegments(const char* row, bool full, void* out) const {
  for (const Segment& segment : segments_) {
    char* to = static_cast<char*>(out) + segment.column * sizeof(float);
    if (full || segment.lazy == 0) {
      Decode(dtype_, row + segment.weights_at, segment.dim, to);
    } else {
      std::memset(to, 0, segment.dim * sizeof(float));
    }
  }
}

void Layout::Fill(uint64_t key, bool zeros, void* out) const {
  if (zeros) {
    std::memset(out, 0, dim_ * sizeof(float));
  } else if (plain_) {
    segments_[0].initializer.Fill(key, dim_, out);
  } else {  // through a row, so that it reads as the row will, rounded alike
    auto row = std::make_unique_for_overwrite<char[]>(full_bytes_);
    Init(key, !has_lazy_, row.get());
    Read(row.get(), !has_lazy_, out);
  }
}

double Layout::Norm(const char* row, bool full) const {
  auto values = std::make_unique_for_overwrite<float[]>(dim_);
  Read(row, full, values.get());
  double sum = 0;
  for (size_t j = 0; j < dim_; ++j) sum += double{values[j]} * double{values[j]};
  return std::sqrt(sum);
}

void Layout::Apply(char* const* rows, const void* const* grads, size_t n, bool full, float rate,
                   uint64_t nonce) const {
  for (const Segment& segment : segments_) {
    if (full || segment.lazy == 0) ApplySegment(segment, rows, grads, n, rate, nonce);
  }
}

void Layout::ApplySegment(const Segment& segment, char* const* rows, const void* const* grads,
                          size_t n, float rate, uint64_t nonce) const {
  const size_t dim = segment.dim;
  const bool encoded = dtype_ != Dtype::kFloat32;
  const size_t chunk = encoded ? std::min(n, kChunk) : n;
  auto weights = std::make_unique_for_overwrite<float*[]>(chunk);
  auto states = std::make_unique_for_overwrite<float*[]>(chunk);
  auto columns = std::make_unique_for_overwrite<const void*[]>(chunk);
  std::unique_ptr<float[]> decoded;
  if (encoded) decoded = std::make_unique_for_overwrite<float[]>(chunk * dim);
  for (size_t begin = 0; begin < n; begin += chunk) {
    const size_t count = std::min(chunk, n - begin);
    for (size_t i = 0; i < count; ++i) {
      char* row = rows[begin + i];
      states[i] = reinterpret_cast<float*>(row + segment.state_at);
      columns[i] = Columns(grads[begin + i], segment);
      if (encoded) {
        weights[i] = decoded.get() + i * dim;
        Decode(dtype_, row + segment.weights_at, dim, weights[i]);
      } else {
        weights[i] = reinterpret_cast<float*>(row + segment.weights_at);
      }
    }
    segment.optimizer.Apply(weights.get(), states.get(), columns.get(), count, dim, rate);
    if (!encoded) continue;
    for (size_t i = 0; i < count; ++i) {
      Store(segment, weights[i], nonce, rows[begin + i]);
    }
  }
}

void Layout::Store(const Segment& segment, const float* values, uint64_t nonce, char* row) const {
  char* to = row + segment.weights_at;
  if (!stochastic_) {
    Encode(dtype_, values, segment.dim, to);
    return;
  }
  // From the push and the weights: a repeat rounds alike; the next push, or another row, does not.
  uint64_t seed = nonce ^ Mix(segment.column);
  for (size_t j = 0; j < segment.dim; ++j) {
    seed = (seed ^ std::bit_cast<uint32_t>(values[j])) * 0x9e3779b97f4a7c15ULL;
  }
  EncodeStochastic(dtype_, values, segment.dim, to, Mix(seed));
}

void Layout::Put(char* row, const void* values, bool full, Write how, uint64_t nonce) const {
  for (const Segment& segment : segments_) {
    if (!full && segment.lazy > 0) continue;
    const char* given = Columns(values, segment);
    char* to = row + segment.weights_at;
    if (how == Write::kAssign) {
      Encode(dtype_, given, segment.dim, to);
      continue;
    }
    auto sum = std::make_unique_for_overwrite<float[]>(segment.dim);
    Decode(dtype_, to, segment.dim, sum.get());
    const UnalignedFloat* delta = reinterpret_cast<const UnalignedFloat*>(given);
    for (size_t j = 0; j < segment.dim; ++j) {
      sum[j] = std::clamp(sum[j] + delta[j], -FLT_MAX, FLT_MAX);
    }
    Store(segment, sum.get(), nonce, row);
  }
}

}  // namespace heterps::ps
