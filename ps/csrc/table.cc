#include "table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "parallel.h"

namespace heterps::ps {
namespace {

constexpr size_t kAhead = 12;            // index entries prefetched ahead
constexpr size_t kParallelFrom = 16384;  // keys from which a batch is worth several threads

HETERPS_CLONES
bool AllFinite(const void* grads, size_t n) {
  const auto* words = static_cast<const char*>(grads);
  constexpr size_t kBlock = 4096;  // leave early, but branch rarely
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const char* block = words + 4 * begin;
    uint32_t bad = 0;
    for (size_t j = 0; j < count; ++j) {
      uint32_t bits;
      std::memcpy(&bits, block + 4 * j, 4);
      bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    if (bad) return false;
  }
  return true;
}

// Runs work(s) for every sub-table that has items.
template <typename Begin, typename Work>
void ForGroups(const Begin& begin, size_t n, Work work) {
  auto one = [&](size_t s) {
    if (begin[s + 1] > begin[s]) work(s);
  };
  if (n >= kParallelFrom) {
    ParallelFor(kSubtables, one);
  } else {
    for (size_t s = 0; s < kSubtables; ++s) one(s);
  }
}

}  // namespace

void CheckFinite(const void* keys, const void* grads, size_t n, size_t dim) {
  if (AllFinite(grads, n * dim)) return;
  const auto* values = static_cast<const UnalignedFloat*>(grads);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      if (std::isfinite(values[i * dim + j])) continue;
      throw std::invalid_argument("gradient of key " + std::to_string(LoadKey(keys, i)) + " (row " +
                                  std::to_string(i) + ") is " +
                                  std::to_string(values[i * dim + j]) + " at element " +
                                  std::to_string(j) + "; expected finite values");
    }
  }
}

Table::Table(size_t dim, Optimizer optimizer, Initializer initializer)
    : dim_(dim),
      width_(dim + optimizer.StateWidth(dim)),
      optimizer_(std::move(optimizer)),
      initializer_(initializer) {
  optimizer_.Prepare();
  for (size_t s = 0; s < kSubtables; ++s) {
    subtables_[s].rows =
        std::make_unique<Rows>(width_, 0.5 + 0.25 * static_cast<double>(s) / kSubtables);
  }
}

void Table::InitRow(uint64_t key, float* row) const {
  initializer_.Fill(key, dim_, row);
  optimizer_.InitState(dim_, row + dim_);
}

Table::Grouped Table::Group(const void* keys, size_t n) const {
  Grouped out{std::make_unique_for_overwrite<Item[]>(n), {}};
  std::array<size_t, kSubtables> next{};
  for (size_t i = 0; i < n; ++i) ++next[SubtableOf(Mix(LoadKey(keys, i)))];
  size_t total = 0;
  for (size_t s = 0; s < kSubtables; ++s) {
    out.begin[s] = total;
    total += next[s];
    next[s] = out.begin[s];
  }
  out.begin[kSubtables] = total;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = LoadKey(keys, i);
    out.items[next[SubtableOf(Mix(key))]++] = {key, i};
  }
  return out;
}

bool Table::Resolve(Rows& rows, const Item* items, size_t n, float** out) {
  const uint32_t stamp = rows.NextStamp();
  bool repeats = false;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) rows.PrefetchIndex(Mix(items[i + kAhead].key));
    const auto found = rows.FindOrCreate(items[i].key, Mix(items[i].key), stamp);
    out[i] = rows.at(found.row);
    if (found.created) InitRow(items[i].key, out[i]);
    repeats |= found.repeated;
  }
  return repeats;
}

void Table::Pull(const void* keys, size_t n, bool read_only, void* out) {
  if (n == 0) return;
  const Grouped grouped = Group(keys, n);
  ForGroups(grouped.begin, n, [&](size_t s) {
    const size_t begin = grouped.begin[s];
    PullGroup(subtables_[s], &grouped.items[begin], grouped.begin[s + 1] - begin, read_only,
              static_cast<char*>(out));
  });
  pulled_.fetch_add(n, std::memory_order_relaxed);
}

void Table::PullGroup(Subtable& sub, const Item* items, size_t n, bool read_only, char* out) {
  const size_t bytes = dim_ * sizeof(float);
  auto addresses = std::make_unique_for_overwrite<float*[]>(n);
  std::lock_guard lock(sub.mutex);
  Rows& rows = *sub.rows;
  if (read_only) {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) rows.PrefetchIndex(Mix(items[i + kAhead].key));
      const uint32_t row = rows.Find(items[i].key, Mix(items[i].key));
      addresses[i] = row == Rows::kMissing ? nullptr : rows.at(row);
    }
  } else {
    Resolve(rows, items, n, addresses.get());
  }
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && addresses[i + kAhead]) {
      const float* ahead = addresses[i + kAhead];
      for (size_t j = 0; j < dim_; j += 16) Prefetch(ahead + j);
    }
    char* to = out + items[i].position * bytes;
    if (addresses[i]) {
      std::memcpy(to, addresses[i], bytes);
    } else {
      initializer_.Fill(items[i].key, dim_, to);
    }
  }
}

void Table::Push(const void* keys, const void* grads, size_t n) {
  CheckFinite(keys, grads, n, dim_);
  Gate::Pass pass(gate_);
  Apply(keys, grads, n);
}

Window::Verdict Table::PushOnce(Window& window, std::string_view client, uint64_t epoch,
                                uint64_t sequence, const void* keys, const void* grads, size_t n) {
  CheckFinite(keys, grads, n, dim_);
  Window::Verdict verdict;
  {
    // One pass around both: a save sees the mark and its rows, or neither.
    Gate::Pass pass(gate_);
    verdict = window.Mark(client, epoch, sequence);
    if (verdict == Window::Verdict::kNew) {
      try {
        Apply(keys, grads, n);
      } catch (...) {
        window.Unmark(client, epoch, sequence);
        throw;
      }
    }
  }
  if (verdict == Window::Verdict::kRepeated) {
    // The first may still be at work; nobody passes a closed gate before it is done.
    gate_.Close();
    gate_.Open();
  }
  return verdict;
}

void Table::Apply(const void* keys, const void* grads, size_t n) {
  if (n == 0) return;
  const Grouped grouped = Group(keys, n);
  ForGroups(grouped.begin, n, [&](size_t s) {
    const size_t begin = grouped.begin[s];
    PushGroup(subtables_[s], &grouped.items[begin], grouped.begin[s + 1] - begin,
              static_cast<const char*>(grads));
  });
  pushed_.fetch_add(n, std::memory_order_relaxed);
}

void Table::PushGroup(Subtable& sub, const Item* items, size_t n, const char* grads) {
  const size_t bytes = dim_ * sizeof(float);
  auto addresses = std::make_unique_for_overwrite<float*[]>(n);
  auto gradients = std::make_unique_for_overwrite<const void*[]>(n);
  for (size_t i = 0; i < n; ++i) gradients[i] = grads + items[i].position * bytes;
  std::lock_guard lock(sub.mutex);
  if (!Resolve(*sub.rows, items, n, addresses.get())) {
    optimizer_.Apply(addresses.get(), gradients.get(), n, dim_);
    return;
  }
  // Some key repeats: sum each key's gradients in the order given, then apply once.
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return addresses[a] < addresses[b]; });
  std::vector<float*> distinct;
  for (size_t i = 0; i < n; ++i) {
    if (i == 0 || addresses[order[i]] != distinct.back()) distinct.push_back(addresses[order[i]]);
  }
  std::vector<float> sums(distinct.size() * dim_, 0.0f);
  std::vector<const void*> summed(distinct.size());
  size_t d = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i > 0 && addresses[order[i]] != distinct[d]) ++d;
    float* sum = &sums[d * dim_];
    const auto* g = static_cast<const UnalignedFloat*>(gradients[order[i]]);
    for (size_t j = 0; j < dim_; ++j) sum[j] += g[j];
    summed[d] = sum;
  }
  optimizer_.Apply(distinct.data(), summed.data(), distinct.size(), dim_);
}

uint64_t Table::rows() const {
  uint64_t total = 0;
  for (const Subtable& sub : subtables_) {
    std::lock_guard lock(sub.mutex);
    total += sub.rows->size();
  }
  return total;
}

uint64_t Table::bytes() const {
  uint64_t total = 0;
  for (const Subtable& sub : subtables_) {
    std::lock_guard lock(sub.mutex);
    total += sub.rows->bytes();
  }
  return total;
}

std::vector<uint64_t> Table::Keys() const {
  std::vector<uint64_t> keys;
  for (const Subtable& sub : subtables_) {
    std::lock_guard lock(sub.mutex);
    sub.rows->ForEach([&](uint64_t key, const float*) { keys.push_back(key); });
  }
  return keys;
}

}  // namespace heterps::ps
