#include "batch/pieces.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "batch/parallel.h"
#include "bindings/platform.h"
#include "table/hash.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 12;
constexpr size_t kRange = 1 << 19;  // bytes of rows that one thread copies in one go

}  // namespace

Pieces::Pieces(const void* keys, size_t n, const uint16_t* route, uint32_t shards)
    : keys_(keys),
      n_(n),
      route_(route),
      shards_(shards),
      distinct_(std::make_unique_for_overwrite<uint64_t[]>(n)),
      inverse_(std::make_unique_for_overwrite<uint32_t[]>(n)),
      found_(n, distinct_.get(), inverse_.get()) {
  if (shards_ > 1) place_ = std::make_unique_for_overwrite<uint32_t[]>(n);
}

std::vector<std::vector<uint64_t>> Pieces::Next(size_t end) {
  if (end < next_ || end > n_) throw std::invalid_argument("pieces come one after the other");
  const size_t begin = std::exchange(next_, end);
  const uint32_t before = found_.count();
  std::vector<uint32_t> owner;  // of the new keys
  std::vector<uint32_t> at(shards_ + 1, 0);
  found_.Add(keys_, begin, end, [&](uint32_t, uint64_t hash) {
    if (shards_ == 1) return;
    owner.push_back(route_[BucketOf(hash)]);
    ++at[owner.back() + 1];
  });
  const uint64_t* fresh = distinct_.get() + before;
  const size_t count = found_.count() - before;
  std::vector<std::vector<uint64_t>> out(shards_);
  if (shards_ == 1) {
    out[0].assign(fresh, fresh + count);
    if (straight_ == begin && found_.count() == end) straight_ = end;
    return out;
  }
  for (uint32_t s = 0; s < shards_; ++s) {
    out[s].reserve(at[s + 1]);
    at[s + 1] += at[s];
  }
  for (size_t u = 0; u < count; ++u) {
    place_[before + u] = before + at[owner[u]]++;
    out[owner[u]].push_back(fresh[u]);
  }
  for (size_t i = begin; i < end; ++i) inverse_[i] = place_[inverse_[i]];
  return out;
}

void Pieces::Spread(size_t begin, size_t end, const float* rows, size_t dim, float* out,
                    bool parallel) const {
  if (begin > end || end > next_) throw std::invalid_argument("rows that were not asked for");
  begin = std::max(begin, std::min(end, straight_));  // those are there
  const auto row_of = [&](size_t i) {
    const size_t at = inverse_[i];
    return (at < straight_ ? out : rows) + at * dim;
  };
  const size_t n = end - begin;
  const size_t ranges =
      parallel ? std::max<size_t>(n * dim * sizeof(float) / kRange, 1) : std::min<size_t>(n, 1);
  const auto copy = [&](size_t r) {
    const size_t first = begin + n * r / ranges, last = begin + n * (r + 1) / ranges;
    for (size_t i = first; i < last; ++i) {
      if (i + kAhead < last) Prefetch(row_of(i + kAhead));
      CopyRow(reinterpret_cast<char*>(out + i * dim), reinterpret_cast<const char*>(row_of(i)),
              dim * sizeof(float));
    }
  };
  if (parallel) {
    ParallelFor(ranges, copy);
  } else if (ranges) {
    copy(0);
  }
}

}  // namespace heterps::ps
