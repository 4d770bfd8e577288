#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATE_THREAD_SANITIZER  // this file is compiled without it: it would see fibers as one
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

#ifndef __x86_64__
#error "the emulation of device code switches stacks on x86-64 alone"
#endif

// Keeps what a function must keep, leaves the stack in *rdi and goes on with that of rsi.
extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.text
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulate_switch, . - emulate_switch
)");

namespace emulate {
namespace {

constexpr size_t kGuard = 4096;
constexpr size_t kStack = 256 * 1024;  // touched as far as it is used

Fiber* leaving = nullptr;
Fiber* arriving = nullptr;

}  // namespace

Fiber::Fiber(void (*body)()) : body_(body) {
  void* memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  bottom_ = memory_ + kGuard;
  size_ = kStack;
  auto** top = reinterpret_cast<void**>(memory_ + kGuard + kStack);
  *--top = nullptr;  // nobody to return to; and the alignment of a function's beginning
  *--top = reinterpret_cast<void*>(&Fiber::begin);
  top_ = top - 6;  // registers
#ifdef EMULATE_THREAD_SANITIZER
  thread_sanitizer_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (memory_ == nullptr) return;
#ifdef EMULATE_THREAD_SANITIZER
  __tsan_destroy_fiber(thread_sanitizer_);
#endif
  munmap(memory_, kGuard + kStack);
}

void Fiber::change(Fiber& from, Fiber& to) {
  leaving = &from;
  arriving = &to;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.address_sanitizer_, to.bottom_, to.size_);
#endif
#ifdef EMULATE_THREAD_SANITIZER
  if (from.memory_ == nullptr) from.thread_sanitizer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.thread_sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
  emulate_switch(&from.top_, to.top_);
  from.arrived();
}

void Fiber::begin() {
  Fiber& self = *arriving;
  self.arrived();
  self.body_();
  std::abort();
}

void Fiber::arrived() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(address_sanitizer_, &bottom, &size);
  if (leaving->memory_ == nullptr) {  // the caller's stack, of which nobody told
    leaving->bottom_ = bottom;
    leaving->size_ = size;
  }
#endif
}

#ifdef EMULATE_THREAD_SANITIZER
void leave(void* place) { __tsan_release(place); }
void enter(void* place) { __tsan_acquire(place); }
Unwatched::Unwatched() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unwatched::~Unwatched() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
void leave(void*) {}
void enter(void*) {}
Unwatched::Unwatched() = default;
Unwatched::~Unwatched() = default;
#endif

}  // namespace emulate
