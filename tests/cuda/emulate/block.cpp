// Runs launches: blocks in random order, the threads of one as fibers.
//
// A thread runs until it waits for others; who goes on is drawn, and in half of the blocks one warp
// is left behind wherever it can be. Errors, which end the launch: threads that wait for some that
// have returned or wait elsewhere; a lane that is not in its own mask; more shared memory than a
// block may have. It cannot run blocks that wait for each other.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {
namespace {

constexpr size_t kMostShared = 48 * 1024;
constexpr unsigned kMostThreads = 1024;

// Who waits for each other.
struct Meeting {
  Site site;
  unsigned mask;          // of a warp: who is to come
  unsigned came = 0;      // as a mask
  void* place = nullptr;  // for `leave` and `enter`
  void* lanes[kLanes] = {};
  std::vector<int> waiting{};
};

struct Thread {
  std::unique_ptr<Fiber> fiber;
  dim3 index;
  std::deque<std::vector<Copy>> copies{1};  // that wait, by groups; the last is open
};

// Places for `leave` and `enter` by turns: who is slow to go from one meeting does not see what
// others bring to the next.
class Turns {
 public:
  void* next() { return &places_[++turn_ % 2]; }

 private:
  char places_[2] = {};
  unsigned turn_ = 0;
};

struct Warp {
  std::vector<std::unique_ptr<Meeting>> meetings;  // those that are under way
  Turns turns;
};

struct Block {
  Meeting barrier{};
  Turns turns;
  std::vector<Warp> warps;
  std::map<const void*, void*> shared;
  size_t shared_size = 0;
  unsigned char poison = 0;
  std::vector<int> ready;
  int returned = 0;
  int starved = -1;  // a warp that goes on when nobody else can: others are far ahead of it

  ~Block() {
    for (auto& variable : shared) std::free(variable.second);
  }
};

std::mutex one_launch;
std::mt19937 chance(1);
std::vector<Thread> threads;  // kept, since to make one is expensive
std::unique_ptr<Block> block;
Fiber* caller = nullptr;
int running = -1;
std::string error;
std::set<std::string> ran;
bool capturing = false;
std::vector<std::function<void()>> graph;
void (*kernel_thread)(void*) = nullptr;
void* kernel = nullptr;
char begun, ended;  // places for `leave` and `enter`

int size_of_block() { return static_cast<int>(blockDim.x * blockDim.y * blockDim.z); }

std::string place(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line) + ": " + site.what;
}

// Gives up this block: the fibers' stacks are left as they are.
[[noreturn]] void give_up(const std::string& what) {
  error = what + " (block " + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
          ", " + std::to_string(blockIdx.z) + ")";
  Fiber::change(*threads[running].fiber, *caller);
  std::abort();
}

[[noreturn]] void stuck() {
  std::string what = std::to_string(block->returned) + " of " + std::to_string(size_of_block()) +
                     " threads have returned";
  const auto add = [&what](const Meeting& meeting) {
    if (meeting.waiting.empty()) return;
    what += ", " + std::to_string(meeting.waiting.size()) + " wait at " + place(meeting.site);
  };
  add(block->barrier);
  for (const auto& warp : block->warps) {
    for (const auto& meeting : warp.meetings) add(*meeting);
  }
  give_up(what);
}

// Goes on with a thread that does not wait, or with the caller when all have returned.
void next() {
  const int left = running;
  auto& ready = block->ready;
  if (ready.empty()) {
    if (block->returned < size_of_block()) stuck();
    Fiber::change(*threads[left].fiber, *caller);
  } else {
    size_t chosen = chance() % ready.size();
    for (size_t i = 0; i < ready.size() && ready[chosen] / kLanes == block->starved; ++i) {
      chosen = (chosen + 1) % ready.size();
    }
    std::swap(ready[chosen], ready.back());
    running = ready.back();
    ready.pop_back();
    threadIdx = threads[running].index;
    if (running == left) return;
    Fiber::change(*threads[left].fiber, *threads[running].fiber);
  }
}

// The body of every fiber: a thread of one block after another.
void thread_of_blocks() {
  for (;;) {
    enter(&begun);
    kernel_thread(kernel);
    for (auto& group : threads[running].copies) {
      if (!group.empty()) give_up("a thread returns while copies to shared memory are under way");
    }
    threads[running].copies.assign(1, {});
    ++block->returned;
    leave(&ended);
    next();
  }
}

void release(Meeting& meeting) {
  block->ready.insert(block->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
}

}  // namespace

bool Site::operator==(const Site& other) const {
  return line == other.line && std::strcmp(file, other.file) == 0 &&
         std::strcmp(what, other.what) == 0;
}

void fail(const char* what, Site site) { give_up(place(site) + ": " + what); }

unsigned lane() { return static_cast<unsigned>(running) % kLanes; }

void meet_block(Site site) {
  Meeting& meeting = block->barrier;
  void* here;
  {
    const Unwatched own;
    if (meeting.waiting.empty()) {
      meeting.site = site;
      meeting.place = block->turns.next();
    }
    if (!(meeting.site == site)) fail(("others wait at " + place(meeting.site)).c_str(), site);
    here = meeting.place;
    leave(here);
    meeting.waiting.push_back(running);
    if (static_cast<int>(meeting.waiting.size()) == size_of_block()) release(meeting);
  }
  next();
  enter(here);
}

void meet_warp(unsigned mask, void* mine, Together together, Site site) {
  const unsigned bit = 1u << lane();
  if ((mask & bit) == 0) fail("a lane that is not in its mask", site);
  Warp& warp = block->warps[running / kLanes];
  void* here;
  {
    const Unwatched own;
    Meeting* meeting = nullptr;
    for (auto& other : warp.meetings) {
      if (other->mask == mask && other->site == site) meeting = other.get();
    }
    if (meeting == nullptr) {
      warp.meetings.push_back(std::make_unique<Meeting>(Meeting{site, mask}));
      meeting = warp.meetings.back().get();
      meeting->place = warp.turns.next();
    }
    here = meeting->place;
    leave(here);
    meeting->came |= bit;
    meeting->lanes[lane()] = mine;
    meeting->waiting.push_back(running);
    if (meeting->came == mask) {
      enter(here);
      together(meeting->lanes, site);
      leave(here);
      release(*meeting);
      std::erase_if(warp.meetings, [&](const auto& other) { return other.get() == meeting; });
    }
  }
  next();
  enter(here);
}

bool copies_later(const Copy& copy) {
  const Unwatched own;
  const bool later = chance() % 2 == 0;
  if (later) threads[running].copies.back().push_back(copy);
  return later;
}

void end_group_of_copies() {
  const Unwatched own;
  threads[running].copies.emplace_back();
}

void await_copies(int groups, void (*make)(const Copy&)) {
  auto& copies = threads[running].copies;
  for (;;) {
    std::vector<Copy> due;
    {
      const Unwatched own;
      if (static_cast<int>(copies.size()) <= groups + 1) return;
      due = std::move(copies.front());
      copies.pop_front();
    }
    for (const Copy& copy : due) make(copy);
  }
}

void* shared_memory(const void* variable, size_t size, size_t alignment) {
  const Unwatched own;
  void*& memory = block->shared[variable];
  if (memory == nullptr) {
    block->shared_size += size;
    if (block->shared_size > kMostShared) {
      give_up("more than 48 KiB of shared memory, " + std::to_string(block->shared_size));
    }
    if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) != 0) std::abort();
    std::memset(memory, block->poison, size);
  }
  return memory;
}

void enqueue(std::function<void()> work) {
  if (capturing) {
    graph.push_back(std::move(work));
  } else {
    work();
  }
}

void begin_capture() { capturing = true; }

std::vector<std::function<void()>> end_capture() {
  capturing = false;
  return std::exchange(graph, {});
}

std::string launched() {
  std::string names;
  for (const std::string& name : ran) names += name + "\n";
  return names;
}

void run(const char* name, dim3 grid, dim3 shape, void (*thread)(void*), void* data) {
  const std::lock_guard<std::mutex> lock(one_launch);
  const Unwatched own;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z, size = shape.x * shape.y * shape.z;
  if (blocks == 0 || size == 0 || size > kMostThreads || grid.y > 65535 || grid.z > 65535) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  ran.insert(name);
  kernel_thread = thread;
  kernel = data;
  gridDim = grid;
  blockDim = shape;
  Fiber here;
  caller = &here;
  leave(&begun);
  for (size_t i = threads.size(); i < size; ++i) {
    threads.push_back({std::make_unique<Fiber>(&thread_of_blocks), {}});
  }
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), chance);
  constexpr unsigned char kPoisons[] = {0xff, 0x7f, 0xcd};
#ifdef EMULATE_THREAD_SANITIZER
  std::vector<std::unique_ptr<Block>> done;  // to it an address stands for one thing
#endif
  for (uint32_t number : order) {
    block = std::make_unique<Block>();
    block->poison = kPoisons[chance() % 3];
    block->warps.resize((size + kLanes - 1) / kLanes);
    if (chance() % 2 == 0) block->starved = static_cast<int>(chance() % block->warps.size());
    blockIdx = dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y);
    for (unsigned i = 0; i < size; ++i) {
      threads[i].index = dim3(i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y);
      block->ready.push_back(static_cast<int>(i));
    }
    running = static_cast<int>(chance() % size);
    std::swap(block->ready[running], block->ready.back());
    block->ready.pop_back();
    threadIdx = threads[running].index;
    Fiber::change(here, *threads[running].fiber);
    if (!error.empty()) {
      threads.clear();
      block.reset();
      throw std::runtime_error(std::string(name) + ", emulated: " + std::exchange(error, {}));
    }
#ifdef EMULATE_THREAD_SANITIZER
    done.push_back(std::move(block));
#endif
  }
  block.reset();
  enter(&ended);
}

}  // namespace emulate
