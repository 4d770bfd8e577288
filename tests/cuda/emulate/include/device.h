// What device code is written in, for a host compiler: `translate.py` includes this first.
//
// Blocks of a launch run one after another, in random order. A block's threads are fibers of one
// thread, of which a random one goes on whenever one waits; see `block.cpp` for what is an error.
#pragma once

#include <math.h>
#include <stdint.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the thread that runs.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

constexpr int kLanes = 32;

// A place in device code where threads wait for each other. Default arguments name the caller's.
struct Site {
  const char* file;
  int line;
  const char* what;
  bool operator==(const Site& other) const;
};

// Ends the launch: it throws std::runtime_error to its caller.
[[noreturn]] void fail(const char* what, Site site);

// Returns when all threads of the block have come to the same site.
void meet_block(Site site);

// Returns when all lanes of `mask` have come to the same site and the last of them has run
// `together` on what each brought: lanes[l] is null for what is not in the mask.
using Together = void (*)(void* const* lanes, Site site);
void meet_warp(unsigned mask, void* mine, Together together, Site site);

unsigned lane();

// A variable of the block: poison where no thread has written.
void* shared_memory(const void* variable, size_t size, size_t alignment);

template <typename T, typename Place>
T& shared(Place) {
  static_assert(std::is_trivially_default_constructible_v<std::remove_all_extents_t<T>>);
  static const char variable = 0;  // one of each place and template argument
  return *static_cast<T*>(shared_memory(&variable, sizeof(T), alignof(T)));
}

// 16 bytes to shared memory, zeros where `from` is null.
struct Copy {
  void* to;
  const void* from;

  void make() const {
    if (from == nullptr) {
      std::memset(to, 0, 16);
    } else {
      std::memcpy(to, from, 16);
    }
  }
};

// Of the thread that runs. Whether the copy waits, as chance has it; the end of a group; makes the
// copies of all groups but the latest. A thread that returns with copies that wait is an error.
bool copies_later(const Copy& copy);
void end_group_of_copies();
void await_copies(int groups, void (*make)(const Copy&));

void run(const char* name, dim3 grid, dim3 block, void (*thread)(void*), void* kernel);

// The names of the kernels that ran, a line each.
std::string launched();

// Does the work of a stream now or, while a graph is captured, keeps it.
void enqueue(std::function<void()> work);

// From one to the other as in cudaStreamBeginCapture and cudaStreamEndCapture.
void begin_capture();
std::vector<std::function<void()>> end_capture();

template <typename Kernel>
void launch(const char* name, dim3 grid, dim3 block, Kernel kernel, void* = nullptr) {
  enqueue([=]() mutable {
    run(name, grid, block, [](void* data) { (*static_cast<Kernel*>(data))(); }, &kernel);
  });
}

template <typename T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4);
  struct Offer {
    T value;
    int source;
    T got;
  } mine{value, source, value};
  meet_warp(
      mask, &mine,
      [](void* const* lanes, Site at) {
        for (int l = 0; l < kLanes; ++l) {
          auto* offer = static_cast<Offer*>(lanes[l]);
          if (offer == nullptr) continue;
          const int from = offer->source;
          if (from < 0 || from >= kLanes || lanes[from] == nullptr) {
            fail("a lane reads one that is not in the mask", at);
          }
          offer->got = static_cast<Offer*>(lanes[from])->value;
        }
      },
      site);
  return mine.got;
}

inline unsigned ballot(unsigned mask, bool holds, Site site) {
  struct Vote {
    bool holds;
    unsigned votes;
  } mine{holds, 0};
  meet_warp(
      mask, &mine,
      [](void* const* lanes, Site) {
        unsigned votes = 0;
        for (int l = 0; l < kLanes; ++l) {
          if (lanes[l] != nullptr && static_cast<Vote*>(lanes[l])->holds) votes |= 1u << l;
        }
        for (int l = 0; l < kLanes; ++l) {
          if (lanes[l] != nullptr) static_cast<Vote*>(lanes[l])->votes = votes;
        }
      },
      site);
  return mine.votes;
}

}  // namespace emulate

#define EMULATE_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATE_HERE {file, line, __func__}

inline void __syncthreads(EMULATE_SITE) { emulate::meet_block(EMULATE_HERE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATE_SITE) {
  emulate::meet_warp(mask, &mask, [](void* const*, emulate::Site) {}, EMULATE_HERE);
}
inline unsigned __ballot_sync(unsigned mask, bool holds, EMULATE_SITE) {
  return emulate::ballot(mask, holds, EMULATE_HERE);
}
inline int __any_sync(unsigned mask, bool holds, EMULATE_SITE) {
  return emulate::ballot(mask, holds, EMULATE_HERE) != 0;
}
inline int __all_sync(unsigned mask, bool holds, EMULATE_SITE) {
  return emulate::ballot(mask, holds, EMULATE_HERE) == mask;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, EMULATE_SITE) {
  return emulate::shuffle(mask, value, source % emulate::kLanes, EMULATE_HERE);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step, EMULATE_SITE) {
  return emulate::shuffle(mask, value, static_cast<int>(emulate::lane()) ^ step, EMULATE_HERE);
}
// Beyond the ends of the warp a lane keeps its own.
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int step, EMULATE_SITE) {
  const int mine = static_cast<int>(emulate::lane());
  return emulate::shuffle(mask, value, mine < step ? mine : mine - step, EMULATE_HERE);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int step, EMULATE_SITE) {
  const int mine = static_cast<int>(emulate::lane());
  const bool beyond = mine + step >= emulate::kLanes;
  return emulate::shuffle(mask, value, beyond ? mine : mine + step, EMULATE_HERE);
}

template <typename T>
T atomicAdd(T* at, T value) {
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_relaxed);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
