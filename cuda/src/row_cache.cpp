#include "heterps/row_cache.h"

#include <stdexcept>

#include "parallel.h"

namespace heterps {

void row_cache_find_cpu(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                        const int64_t* keys, int64_t* slots, int threads) {
  parallel_parts(n, cache.ways, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = cache_set(keys[i], cache.sets) * cache.ways;
      slots[i] = -1;
      for (int64_t s = first; s < first + cache.ways; ++s) {
        if (cache.keys[s] != keys[i] || cache.used[s] < 0) continue;
        slots[i] = s;
        cache.used[s] = tick;
        cache.score[s] = lfu ? cache.score[s] + 1 : tick;
        break;
      }
    }
  });
}

void row_cache_admit_cpu(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                         const int64_t* keys, const int64_t* order, int64_t* slots, int64_t* left,
                         uint8_t* evicted, int threads) {
  (void)threads;  // the rows that are fetched meanwhile cost far more
  for (int64_t p = 0; p < n; ++p) {
    const int64_t i = order[p];
    if (i < 0 || i >= n) throw std::out_of_range("order: expected indices of keys");
    cache_admit(cache, lfu, tick, keys[i], slots + i, left + i, evicted + i);
  }
}

}  // namespace heterps
