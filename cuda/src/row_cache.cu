#include <stdexcept>

#include "check.cuh"
#include "heterps/row_cache.cuh"

namespace heterps {
namespace {

unsigned blocks_of(int64_t threads) {
  const int64_t blocks = (threads + kCacheThreads - 1) / kCacheThreads;
  if (blocks > INT32_MAX) throw std::runtime_error("row_cache: too many keys for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void row_cache_find_cuda(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                         const int64_t* keys, int64_t* slots, void* stream) {
  if (n == 0) return;
  row_cache_find_kernel<<<blocks_of(n * 32), kCacheThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      cache, lfu, tick, n, keys, slots);
  check_cuda(cudaGetLastError(), "row_cache_find");
}

void row_cache_admit_cuda(const CacheState& cache, bool lfu, int64_t tick, int64_t n,
                          const int64_t* keys, const int64_t* order, int64_t* slots, int64_t* left,
                          uint8_t* evicted, void* stream) {
  if (n == 0) return;
  row_cache_admit_kernel<<<blocks_of(n), kCacheThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      cache, lfu, tick, n, keys, order, slots, left, evicted);
  check_cuda(cudaGetLastError(), "row_cache_admit");
}

}  // namespace heterps
