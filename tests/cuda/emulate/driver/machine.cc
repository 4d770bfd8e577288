// The emulation itself: what it does as hardware would, and what it refuses.
#include <functional>

#include "check.h"
#include "cuda_runtime.h"

namespace heterps {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// A launch that must end in an error that says `expected`.
void refused(unsigned threads, const char* expected, const std::function<void()>& kernel) {
  try {
    emulate::launch("machine", 2, threads, kernel);
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()).find(expected) != std::string::npos) return;
    throw std::runtime_error(std::string("expected ") + expected + ", got " + error.what());
  }
  throw std::runtime_error(std::string("a launch that succeeds; expected ") + expected);
}

void refusals() {
  refused(64, "1 of 64 threads have returned, 63 wait at", [] {
    if (threadIdx.x == 3) return;
    __syncthreads();
  });
  refused(64, "others wait at", [] {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  });
  refused(32, "not in its mask", [] { __syncwarp(0xffff); });
  refused(32, "16 of 32 threads have returned, 16 wait at",
          [] { __syncwarp(threadIdx.x < 16 ? kAll : 0xffff0000u); });
  refused(32, "not in the mask", [] {
    if (threadIdx.x < 16) __shfl_xor_sync(0xffffu, 1, 16);
  });
  refused(32, "have returned", [] {
    if (threadIdx.x > 0) __syncwarp();
  });
  refused(32, "48 KiB", [] { emulate::shared<char[49153]>([] {}); });
  emulate::launch("machine", 0, 32, [] {});
  if (cudaGetLastError() == cudaSuccess) throw std::runtime_error("a grid of no blocks");
  emulate::launch("machine", 1, 1025, [] {});
  if (cudaGetLastError() == cudaSuccess) throw std::runtime_error("a block of 1025 threads");
}

}  // namespace

void fuzz_machine() {
  // Threads reverse their numbers through shared memory, which is poison at first.
  constexpr int kThreads = 96;
  Array<int> out(3 * kThreads), wanted(3 * kThreads), order(3 * kThreads), total(1);
  total[0] = 0;
  bool poisoned = true;
  emulate::launch("machine", 3, kThreads, [&] {
    auto& numbers = emulate::shared<int[kThreads]>([] {});
    const int i = static_cast<int>(threadIdx.x), at = static_cast<int>(blockIdx.x) * kThreads + i;
    if (i == 0) order[at] = atomicAdd(total.data(), 1);
    poisoned = poisoned && numbers[i] != at;
    __syncthreads();
    numbers[i] = at;
    __syncthreads();
    out[at] = numbers[kThreads - 1 - i];
  });
  for (int i = 0; i < wanted.size(); ++i) wanted[i] = i / kThreads * kThreads + 95 - i % kThreads;
  same(out, wanted, 0, "a launch");
  if (!poisoned || total[0] != 3) throw std::runtime_error("shared memory without poison");

  // A warp's sums, votes and shuffles; halves of it on their own.
  Array<int> got(32 * 6), right(32 * 6);
  emulate::launch("machine", 1, 32, [&] {
    const int i = static_cast<int>(threadIdx.x);
    int* mine = got.data() + 6 * i;
    mine[0] = __shfl_xor_sync(kAll, i, 5);
    mine[1] = __shfl_up_sync(kAll, i, 3);
    mine[2] = __shfl_down_sync(kAll, i, 3);
    mine[3] = __shfl_sync(i < 16 ? 0xffffu : 0xffff0000u, i, i < 16 ? 2 : 18);
    mine[4] = static_cast<int>(__ballot_sync(kAll, i % 3 == 0));
    mine[5] = __any_sync(kAll, i == 7) + 2 * __all_sync(kAll, i != 7) + 4 * __all_sync(kAll, true);
  });
  for (int i = 0; i < 32; ++i) {
    const int values[] = {i ^ 5,           i < 3 ? i : i - 3, i > 28 ? i : i + 3,
                          i < 16 ? 2 : 18, 0x49249249,        5};
    std::copy_n(values, 6, right.data() + 6 * i);
  }
  same(got, right, 0, "a warp");
  refusals();
}

}  // namespace heterps
