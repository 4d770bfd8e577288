#include "batch/merge.h"

#include <algorithm>
#include <cstring>

#include "batch/batch.h"
#include "batch/distinct.h"
#include "batch/parallel.h"
#include "bindings/platform.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 12;
constexpr size_t kRange = 1 << 16;         // values that one thread takes in one go
constexpr size_t kParallelFrom = 1 << 18;  // values from which several threads are worth it
constexpr size_t kShares = 4;

// Adds those rows whose sums lie in [begin, end): each sum has one thread, and one order.
HETERPS_CLONES
void AddRows(const KeyedRows& part, const uint32_t* inverse, size_t dim, size_t begin, size_t end,
             bool* filled, float* sums) {
  const size_t bytes = dim * sizeof(float);
  for (size_t i = 0; i < part.count; ++i) {
    if (i + kAhead < part.count) Prefetch(sums + size_t{inverse[i + kAhead]} * dim);
    const size_t at = inverse[i];
    if (at < begin || at >= end) continue;
    float* __restrict sum = sums + at * dim;
    if (!filled[at]) {
      filled[at] = true;
      std::memcpy(sum, part.rows + i * bytes, bytes);
      continue;
    }
    const UnalignedFloat* __restrict row =
        static_cast<const UnalignedFloat*>(static_cast<const void*>(part.rows + i * bytes));
    for (size_t j = 0; j < dim; ++j) sum[j] += row[j];
  }
}

// In double no square of a float overflows, and a sum of them is not finite only if one is not.
HETERPS_CLONES
double Squares(const UnalignedFloat* values, size_t n) {
  constexpr size_t kLanes = 8;
  double lane[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t k = 0; k < kLanes; ++k) {
      const double value = values[i + k];
      lane[k] += value * value;
    }
  }
  for (size_t k = 0; i + k < n; ++k) {
    const double value = values[i + k];
    lane[k] += value * value;
  }
  double sum = 0;
  for (const double part : lane) sum += part;
  return sum;
}

HETERPS_CLONES
void ScaleRange(const UnalignedFloat* values, size_t n, double scale, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(values[i] * scale);
}

// Calls work(begin, end) for ranges of n values.
template <typename Work>
void ForRanges(size_t n, const Work& work) {
  const size_t ranges = (n + kRange - 1) / kRange;
  const auto range = [&](size_t r) { work(r, r * kRange, std::min(n, (r + 1) * kRange)); };
  if (n < kParallelFrom) {
    for (size_t r = 0; r < ranges; ++r) range(r);
  } else {
    ParallelFor(ranges, range);
  }
}

}  // namespace

void Merge(const std::vector<KeyedRows>& parts, size_t dim, Merged* out) {
  size_t n = 0;
  for (const KeyedRows& part : parts) n += part.count;
  auto keys = std::make_unique_for_overwrite<uint64_t[]>(n);
  size_t at = 0;
  for (const KeyedRows& part : parts) {
    if (part.key_bytes == 8) {
      std::memcpy(&keys[at], part.keys, 8 * part.count);
    } else {
      for (size_t i = 0; i < part.count; ++i) {
        uint32_t key;
        std::memcpy(&key, part.keys + 4 * i, 4);
        keys[at + i] = key;
      }
    }
    at += part.count;
  }
  auto inverse = std::make_unique_for_overwrite<uint32_t[]>(n);
  out->keys = std::make_unique_for_overwrite<uint64_t[]>(n);
  out->count =
      FindDistinct(keys.get(), n, out->keys.get(), inverse.get(), [](uint32_t, uint64_t) {});
  out->sums = std::make_unique_for_overwrite<float[]>(out->count * dim);
  auto filled = std::make_unique<bool[]>(out->count);
  const size_t shares = n * dim < kParallelFrom ? 1 : kShares;
  const auto share = [&](size_t s) {
    const size_t begin = out->count * s / shares, end = out->count * (s + 1) / shares;
    const uint32_t* positions = inverse.get();
    for (const KeyedRows& part : parts) {
      AddRows(part, positions, dim, begin, end, filled.get(), out->sums.get());
      positions += part.count;
    }
  };
  if (shares == 1) {
    share(0);
  } else {
    ParallelFor(shares, share);
  }
}

double SquaredNorm(const void* values, size_t n) {
  std::vector<double> sums((n + kRange - 1) / kRange);
  const UnalignedFloat* all = static_cast<const UnalignedFloat*>(values);
  ForRanges(
      n, [&](size_t r, size_t begin, size_t end) { sums[r] = Squares(all + begin, end - begin); });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void Scale(const void* values, size_t n, double scale, float* out) {
  const UnalignedFloat* all = static_cast<const UnalignedFloat*>(values);
  ForRanges(n, [&](size_t, size_t begin, size_t end) {
    ScaleRange(all + begin, end - begin, scale, out + begin);
  });
}

}  // namespace heterps::ps
