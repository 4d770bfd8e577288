// A queue of reads of files that go on by themselves, many at once (io_uring). Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace heterps::ps {

class Ring {
 public:
  enum class What { kNothing, kRead };
  class Asked {
   public:
    // Of so many bytes, or -errno. Another thread may call it, of those that use the ring in turns.
    virtual void Done(int result) = 0;

   protected:
    ~Asked() = default;
  };

  // Null where the system has no such queues, or none for this process.
  static std::unique_ptr<Ring> Open();
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void Push(What what, int fd, void* bytes, size_t size, uint64_t offset, Asked* asked);
  // Hands over what was pushed, and waits until so many are done. It may have to be asked again.
  bool Enter(unsigned at_least);
  // Tells those that are done; whether there are any.
  bool TakeDone();

 private:
  Ring() = default;

  int fd_ = -1;
  // Shared with the kernel: what is asked for, and what is done.
  char* queue_ = nullptr;
  void* entries_ = nullptr;
  size_t queue_bytes_ = 0, entry_bytes_ = 0;
  unsigned room_ = 0, mask_ = 0, done_mask_ = 0;
  unsigned *head_ = nullptr, *tail_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  const void* done_ = nullptr;
};

}  // namespace heterps::ps
