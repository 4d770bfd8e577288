// Threads of execution that hand over to each other by name, on stacks of their own.
#pragma once

#include <cstddef>

namespace emulate {

class Fiber {
 public:
  Fiber() = default;               // that of the caller
  explicit Fiber(void (*body)());  // begins with `body`, which never returns, when switched to
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which runs, until somebody switches to it.
  static void change(Fiber& from, Fiber& to);

 private:
  static void begin();
  void arrived();

  void (*body_)() = nullptr;
  void* top_ = nullptr;  // of the stack where it is left
  char* memory_ = nullptr;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* address_sanitizer_ = nullptr;
  void* thread_sanitizer_ = nullptr;
};

// For the thread sanitizer: what came before `leave` is seen by who calls `enter` later.
void leave(void* place);
void enter(void* place);

// What the emulation itself does with memory is no business of the thread sanitizer's. Of the fiber
// that runs: to live until another does.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
};

}  // namespace emulate
