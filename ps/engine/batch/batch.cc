#include "batch/batch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "batch/distinct.h"
#include "batch/parallel.h"
#include "bindings/platform.h"
#include "table/hash.h"

namespace heterps::ps {
namespace {
constexpr size_t kAhead = 12;
constexpr size_t kFewParts = 8;
constexpr size_t kRange = 1 << 19;  // bytes of rows that one thread copies in one go

}  // namespace

void FindUnique(const void* keys, size_t n, Unique* out) {
  auto distinct = std::make_unique_for_overwrite<uint64_t[]>(n);
  auto inverse = std::make_unique_for_overwrite<int64_t[]>(n);
  const size_t count =
      FindDistinct(keys, n, distinct.get(), inverse.get(), [](uint32_t, uint64_t) {});
  *out = {std::move(distinct), count, std::move(inverse)};
}

std::vector<Part> Partition(const void* keys, size_t n, const uint16_t* route, uint32_t shards) {
  std::vector<Part> parts(shards);
  std::vector<size_t> counts(shards, 0);
  for (size_t i = 0; i < n; ++i) ++counts[route[BucketOf(Mix(LoadKey(keys, i)))]];
  for (uint32_t s = 0; s < shards; ++s) {
    parts[s].keys.reserve(counts[s]);
    parts[s].positions.reserve(counts[s]);
  }
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = LoadKey(keys, i);
    Part& part = parts[route[BucketOf(Mix(key))]];
    part.keys.push_back(key);
    part.positions.push_back(static_cast<int64_t>(i));
  }
  return parts;
}

void CopyRows(const std::vector<RowPart>& parts, size_t distinct, const int64_t* inverse, size_t n,
              size_t dim, Dtype from, float* to) {
  const size_t bytes = dim * SizeOf(from);
  const auto copy = [&](auto row) {
    const size_t ranges = std::max<size_t>(n * dim * sizeof(float) / kRange, 1);
    ParallelFor(ranges, [&](size_t r) {
      const size_t begin = n * r / ranges, end = n * (r + 1) / ranges;
      for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < end) Prefetch(row(i + kAhead));
        if (from == Dtype::kFloat32) {
          CopyRow(to + i * dim, row(i), bytes);
        } else {
          Decode(from, row(i), dim, to + i * dim);
        }
      }
    });
  };
  if (parts.size() == 1 && !parts[0].positions) {
    const char* rows = parts[0].rows;
    if (inverse) {
      copy([=](size_t i) { return rows + static_cast<size_t>(inverse[i]) * bytes; });
    } else {
      copy([=](size_t i) { return rows + i * bytes; });
    }
    return;
  }
  const bool placed =
      std::any_of(parts.begin(), parts.end(), [](const RowPart& part) { return part.positions; });
  if (inverse && !placed && parts.size() <= kFewParts) {
    // Comparing is faster than a table of addresses, of which most are not in the cache.
    std::array<size_t, kFewParts> ends;
    std::array<uintptr_t, kFewParts + 1> bases;  // where row 0 would lie
    size_t begin = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
      bases[p] = reinterpret_cast<uintptr_t>(parts[p].rows) - begin * bytes;
      ends[p] = begin += parts[p].count;
    }
    const size_t last = parts.size() - std::min<size_t>(parts.size(), 1);
    copy([&](size_t i) {
      const auto at = static_cast<size_t>(inverse[i]);
      size_t p = 0;
      for (size_t q = 0; q < last; ++q) p += at >= ends[q];
      return reinterpret_cast<const char*>(bases[p] + at * bytes);
    });
    return;
  }
  auto rows = std::make_unique_for_overwrite<const char*[]>(distinct);
  size_t next = 0;
  for (const RowPart& part : parts) {
    for (size_t j = 0; j < part.count; ++j) {
      const size_t at = part.positions ? static_cast<size_t>(part.positions[j]) : next++;
      rows[at] = part.rows + j * bytes;
    }
  }
  if (inverse) {
    copy([&](size_t i) { return rows[static_cast<size_t>(inverse[i])]; });
  } else {
    copy([&](size_t i) { return rows[i]; });
  }
}

void CopyKeys(const void* keys, size_t n, size_t key_bytes, void* to) {
  if (key_bytes == 8) {
    std::memcpy(to, keys, 8 * n);
    return;
  }
  auto* out = static_cast<char*>(to);
  for (size_t i = 0; i < n; ++i) {
    const auto key = static_cast<uint32_t>(LoadKey(keys, i));
    std::memcpy(out + 4 * i, &key, 4);
  }
}

HETERPS_CLONES
void SegmentSum(const int64_t* inverse, const void* grads, size_t n, size_t segments, size_t dim,
                float* sums) {
  std::memset(sums, 0, segments * dim * sizeof(float));
  const UnalignedFloat* values = static_cast<const UnalignedFloat*>(grads);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(sums + static_cast<size_t>(inverse[i + kAhead]) * dim);
    float* __restrict sum = sums + static_cast<size_t>(inverse[i]) * dim;
    const UnalignedFloat* __restrict g = values + i * dim;
    for (size_t j = 0; j < dim; ++j) sum[j] += g[j];
  }
}

}  // namespace heterps::ps
