// A set-associative cache of rows by key: what is where, and who gives way.
//
// A key belongs to one set of `ways` slots. A slot has a score, by which the lowest gives way: the
// tick of its last use (LRU) or the number of its uses (LFU); among equals the lower slot. A slot
// used in the current tick stays, so that a batch never evicts its own rows. The keys of a call are
// distinct, hence every slot has one writer, and results are equal on every run and device.
#pragma once

#include <cstdint>

namespace heterps {

constexpr int64_t kMostWays = 32;  // a warp looks at a set at once

struct CacheState {
  int64_t sets;
  int64_t ways;
  int64_t* keys;   // [sets * ways]
  int64_t* used;   // [sets * ways] tick of the last use, -1 when empty
  int64_t* score;  // [sets * ways]
};

// Finalizer of MurmurHash3: neighbouring keys fall into sets far apart.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int64_t cache_set(int64_t key, int64_t sets) {
  uint64_t h = static_cast<uint64_t>(key);
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdull;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<int64_t>((h ^ (h >> 33)) % static_cast<uint64_t>(sets));
}

// slots[i] = where keys[i] lies, or -1; what is found counts as used.
void row_cache_find_cpu(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                        const int64_t* keys, int64_t* slots, int threads);
// slots[i] = where keys[i], which is not in the cache, lies from now on, or -1 where all slots of
// its set are in use; evicted[i] = whether another key gave way, left[i] = that key. `order` sorts
// the keys by set, stably.
void row_cache_admit_cpu(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                         const int64_t* keys, const int64_t* order, int64_t* slots, int64_t* left,
                         uint8_t* evicted, int threads);

// Enqueue on `stream` (a cudaStream_t); do not synchronise.
void row_cache_find_cuda(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                         const int64_t* keys, int64_t* slots, void* stream);
void row_cache_admit_cuda(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                          const int64_t* keys, const int64_t* order, int64_t* slots, int64_t* left,
                          uint8_t* evicted, void* stream);

// One key into its set; what both twins do.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline void cache_admit(const CacheState& cache, bool lfu, int64_t tick, int64_t key,
                            int64_t* slot, int64_t* left, uint8_t* evicted) {
  const int64_t first = cache_set(key, cache.sets) * cache.ways;
  int64_t victim = -1;
  for (int64_t s = first; s < first + cache.ways; ++s) {
    if (cache.used[s] < 0) {
      victim = s;
      break;
    }
    if (cache.used[s] == tick) continue;
    if (victim < 0 || cache.score[s] < cache.score[victim]) victim = s;
  }
  *slot = victim;
  *evicted = victim >= 0 && cache.used[victim] >= 0;
  *left = *evicted ? cache.keys[victim] : 0;
  if (victim < 0) return;
  cache.keys[victim] = key;
  cache.used[victim] = tick;
  cache.score[victim] = lfu ? 1 : tick;
}

}  // namespace heterps
