#include "batch/plan.h"

#include <algorithm>

#include "batch/distinct.h"
#include "table/hash.h"

namespace heterps::ps {
namespace {

constexpr size_t kMostParts = 4096;  // more would not be written side by side well

}  // namespace

void MakePlan(const void* keys, size_t n, const uint16_t* route, uint32_t shards, Plan* out) {
  const size_t within = std::max<size_t>(std::min<size_t>(kSubtables, kMostParts / shards), 1);
  std::vector<uint32_t> next(within * shards + 1, 0);  // first the counts, one further on
  auto distinct = std::make_unique_for_overwrite<uint64_t[]>(n);
  auto part_of = std::make_unique_for_overwrite<uint16_t[]>(n);  // distinct keys
  auto found = std::make_unique_for_overwrite<uint32_t[]>(n);
  const uint32_t count =
      FindDistinct(keys, n, distinct.get(), found.get(), [&](uint32_t u, uint64_t hash) {
        const size_t part = route[BucketOf(hash)] * within + SubtableOf(hash) * within / kSubtables;
        ++next[part + 1];
        part_of[u] = static_cast<uint16_t>(part);
      });
  for (size_t p = 1; p < next.size(); ++p) next[p] += next[p - 1];
  out->count = count;
  out->begin.clear();
  for (size_t s = 0; s <= shards; ++s) out->begin.push_back(next[s * within]);
  out->keys = std::make_unique_for_overwrite<uint64_t[]>(count);
  auto place = std::make_unique_for_overwrite<uint32_t[]>(count);
  for (uint32_t u = 0; u < count; ++u) {
    place[u] = next[part_of[u]]++;
    out->keys[place[u]] = distinct[u];
  }
  out->inverse = std::make_unique_for_overwrite<int64_t[]>(n);
  for (size_t i = 0; i < n; ++i) out->inverse[i] = place[found[i]];
}

}  // namespace heterps::ps
