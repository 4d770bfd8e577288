// The engine under several threads, to be built with a sanitizer: everything that a shard does to
// a table at once. Ends with 0 when each row is what the pushes made it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "batch/batch.h"
#include "batch/plan.h"
#include "table/table.h"
#include "table/window.h"

namespace {

using heterps::ps::Admission;
using heterps::ps::Dtype;
using heterps::ps::Initializer;
using heterps::ps::Layout;
using heterps::ps::Optimizer;
using heterps::ps::Options;
using heterps::ps::PullBatch;
using heterps::ps::PushBatch;
using heterps::ps::Segment;
using heterps::ps::Selection;
using heterps::ps::Table;

constexpr size_t kDim = 5;
constexpr uint64_t kKeys = 3000;
constexpr int kPushers = 3;
constexpr int kPushes = 60;

Options Plain(Dtype dtype, uint64_t memory_bytes, const std::string& directory) {
  Segment wide, deep;
  wide.dim = 1;
  deep.dim = kDim - 1;
  for (Segment* segment : {&wide, &deep}) {
    segment->optimizer.kind = Optimizer::Kind::kSgd;
    segment->optimizer.learning_rate = 1;
    segment->initializer.kind = Initializer::Kind::kZeros;
  }
  return {Layout({wide, deep}, dtype, false), {}, {}, {}, memory_bytes, directory};
}

void Fail(const char* what, uint64_t key, float got, float expected) {
  std::fprintf(stderr, "%s: key %llu is %g, expected %g\n", what,
               static_cast<unsigned long long>(key), static_cast<double>(got),
               static_cast<double>(expected));
  std::exit(1);
}

// Keys of one sub-table, whose file is full of holes soon, or the lowest of all.
std::vector<uint64_t> Names(bool crowded) {
  std::vector<uint64_t> names;
  for (uint64_t key = 0; names.size() < kKeys; ++key) {
    if (!crowded || heterps::ps::SubtableOf(heterps::ps::Mix(key)) == 0) names.push_back(key);
  }
  return names;
}

// Pushers add one to every key they touch; at the end each key must have as many as it was given.
void Hammer(const char* name, Options options, bool crowded = false) {
  Table table(std::move(options));
  const std::vector<uint64_t> names = Names(crowded);
  std::shared_mutex gate;  // pushes share it, a cut has it alone
  std::vector<std::atomic<int>> given(kKeys);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int p = 0; p < kPushers; ++p) {
    threads.emplace_back([&, p] {
      std::mt19937_64 random(static_cast<uint64_t>(p) + 1);
      for (int i = 0; i < kPushes; ++i) {
        std::vector<uint64_t> places(600), keys(600);
        for (size_t k = 0; k < keys.size(); ++k) {
          places[k] = random() % kKeys;  // some twice
          keys[k] = names[places[k]];
        }
        const std::vector<float> grads(keys.size() * kDim, -1.0f);
        PushBatch batch;
        batch.values = reinterpret_cast<const char*>(grads.data());
        batch.nonce = random();
        gate.lock_shared();
        table.Push(keys.data(), keys.size(), 8, batch);
        for (const uint64_t place : places) ++given[place];
        gate.unlock_shared();
      }
    });
  }
  threads.emplace_back([&] {
    std::vector<float> rows(kKeys * kDim);
    while (!stop) {
      PullBatch batch;
      batch.out = reinterpret_cast<char*>(rows.data());
      table.Pull(names.data(), names.size(), 8, batch);
      table.counters();
      table.Keys(100);
      table.Demote();
    }
  });
  threads.emplace_back([&] {
    while (!stop) {  // every snapshot holds, of every key, what it had at the cut
      std::vector<int> at_cut(kKeys);
      Selection selection;
      gate.lock();
      table.Begin(&selection);
      for (uint64_t k = 0; k < kKeys; ++k) at_cut[k] = given[k];
      gate.unlock();
      Table copy(Plain(table.options().layout.dtype(), 0, ""));
      for (;;) {
        const std::vector<char> block = table.Next();
        if (block.empty()) break;
        copy.Absorb(block.data(), block.size(), nullptr);
      }
      table.End();
      for (uint64_t k = 0; k < kKeys; ++k) {
        float row[kDim];
        PullBatch batch;
        batch.read_only = true;
        batch.out = reinterpret_cast<char*>(row);
        copy.Pull(&names[k], 1, 8, batch);
        if (row[0] != static_cast<float>(at_cut[k])) {
          Fail("snapshot", k, row[0], static_cast<float>(at_cut[k]));
        }
      }
    }
  });
  for (int p = 0; p < kPushers; ++p) threads[static_cast<size_t>(p)].join();
  stop = true;
  for (size_t t = kPushers; t < threads.size(); ++t) threads[t].join();
  for (uint64_t k = 0; k < kKeys; ++k) {
    float row[kDim];
    PullBatch batch;
    batch.out = reinterpret_cast<char*>(row);
    table.Pull(&names[k], 1, 8, batch);
    for (const float value : row) {
      if (value != static_cast<float>(given[k])) {
        Fail(name, k, value, static_cast<float>(given[k]));
      }
    }
  }
  if (crowded && table.counters().tidied == 0) Fail("tidied", 0, 0, 1);
  std::printf("%s: ok\n", name);
}

// Batches large enough for the thread pool, at odd addresses, with evictions in between.
void Batches() {
  std::mt19937_64 random(9);
  std::vector<char> memory(8 * 20000 + 1);
  char* keys = memory.data() + 1;
  for (size_t i = 0; i < 20000; ++i) {
    const uint64_t key = random() % 15000;
    std::memcpy(keys + 8 * i, &key, 8);
  }
  heterps::ps::Unique unique;
  heterps::ps::FindUnique(keys, 20000, &unique);
  for (size_t i = 0; i < 20000; ++i) {
    uint64_t key;
    std::memcpy(&key, keys + 8 * i, 8);
    if (unique.keys[static_cast<size_t>(unique.inverse[i])] != key) Fail("unique", key, 0, 1);
  }
  std::vector<uint16_t> route(heterps::ps::kBuckets);
  for (size_t b = 0; b < route.size(); ++b) route[b] = static_cast<uint16_t>(b % 3);
  heterps::ps::Plan plan;
  heterps::ps::MakePlan(keys, 20000, route.data(), 3, &plan);
  if (plan.count != unique.count) Fail("plan", 0, 0, 1);
  for (size_t i = 0; i < 20000; ++i) {
    uint64_t key;
    std::memcpy(&key, keys + 8 * i, 8);
    if (plan.keys[static_cast<size_t>(plan.inverse[i])] != key) Fail("plan", key, 0, 1);
  }
  Options options = Plain(Dtype::kInt8, 0, "");
  options.eviction.max_rows = 4000;
  options.admission.kind = Admission::Kind::kCount;
  options.admission.threshold = 2;
  Table table(std::move(options));
  std::vector<float> grads(20000 * kDim, 0.5f);
  for (int i = 0; i < 4; ++i) {
    PushBatch batch;
    batch.values = reinterpret_cast<const char*>(grads.data());
    table.Push(keys, 20000, 8, batch);
    table.Shrink(static_cast<uint32_t>(i), 0, true);
    if (table.counters().rows > 4000) Fail("shrink", 0, 0, 4000);
  }
  heterps::ps::Window window;
  std::vector<std::thread> threads;
  std::atomic<int> fresh{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (uint64_t s = 1; s <= 2000; ++s) {
        if (window.Mark("me", 1, s) == heterps::ps::Window::Verdict::kNew) ++fresh;
      }
      window.Merge(window.Export());
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (fresh != 2000) Fail("window", 0, static_cast<float>(fresh.load()), 2000);
  std::printf("batches: ok\n");
}

}  // namespace

int main(int, char** argv) {
  Hammer("memory", Plain(Dtype::kFloat32, 0, ""));
  Hammer("float16", Plain(Dtype::kFloat16, 0, ""));
  Hammer("disk", Plain(Dtype::kFloat32, 96 << 10, argv[1]));
  Hammer("one part of a disk", Plain(Dtype::kFloat32, 64 * (40 << 10), argv[1]), true);
  Batches();
  return 0;
}
