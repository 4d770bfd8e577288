// Records that are read from disk many at once and past the page cache (io_uring, O_DIRECT).
//
// Pages of a cache would be read for one record each, and where a control group caps memory the
// kernel has those who need the next ones sleep until some are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace heterps::ps {

// Memory for them. A thread keeps some for its next ones: what malloc would keep of so many sizes
// is more than they take.
struct FreeBlock {
  size_t align = 0, size = 0;
  void operator()(char* bytes) const;
};
using Block = std::unique_ptr<char, FreeBlock>;
Block BlockOf(size_t align, size_t bytes);

class Fetched;

// A queue of reads. Not thread-safe.
class Reads {
 public:
  // Null where the system has no such queues, or none for this process.
  static std::unique_ptr<Reads> Open();
  ~Reads();
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

 private:
  friend class Fetched;

  Reads() = default;
  void Push(int fd, void* to, size_t size, uint64_t offset, void* what);
  // Hands over what was pushed, and waits until so many are done. It may have to be asked again.
  bool Enter(unsigned at_least);
  // Tells those that are done; whether there are any.
  bool TakeDone();

  int fd_ = -1;
  // Shared with the kernel: what is asked for, and what is done.
  char* queue_ = nullptr;
  void* entries_ = nullptr;
  size_t queue_bytes_ = 0, entry_bytes_ = 0;
  unsigned room_ = 0, mask_ = 0, done_mask_ = 0;
  unsigned *head_ = nullptr, *tail_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  const void* done_ = nullptr;
};

// Records of slots, as they were when they were asked for.
class Fetched {
 public:
  // Of a file that is open for reads of multiples of `align` bytes, to and from such places.
  Fetched(Reads& reads, int fd, size_t align) : reads_(&reads), fd_(fd), align_(align) {}
  ~Fetched() { Wait(); }
  Fetched(const Fetched&) = delete;
  Fetched& operator=(const Fetched&) = delete;

  // To be read; a slot that comes twice is read once.
  void Add(uint32_t slot, uint32_t version, size_t size, uint64_t offset);
  void Begin();
  void Wait();
  // The record of a slot that is still of this version; null where there is none.
  const char* Find(uint32_t slot, uint32_t version) const;

 private:
  friend class Reads;
  struct One {
    Fetched* of;
    uint64_t offset;  // of the record
    uint32_t size, slot, version;
    const char* record;
    bool whole = false;
    void Done(int read);
  };
  size_t SpanOf(const One& one) const;  // bytes that are read for it
  uint32_t* Entry(uint32_t slot);
  const uint32_t* Entry(uint32_t slot) const { return const_cast<Fetched*>(this)->Entry(slot); }

  Reads* reads_;
  int fd_;
  size_t align_;
  std::vector<One> all_;
  std::vector<uint32_t> places_;  // by slot: 0, or 1 + the place in all_
  Block bytes_;
  size_t left_ = 0;
};

}  // namespace heterps::ps
