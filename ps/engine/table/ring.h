// A queue of reads of files that go on by themselves, many at once (io_uring). Not thread-safe.
//
// No read is one that would have to wait for a lock or for room in the device's queue: the system
// would have threads of its own wait with it, which are slow, and a read whose thread is not made
// never ends. It is asked for again when others are done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

namespace heterps::ps {

class Ring {
 public:
  class Asked {
   public:
    // Of so many bytes, or -errno. Another thread may call it, of those that use the ring in turns.
    virtual void Done(int result) = 0;

   protected:
    ~Asked() = default;

   private:
    friend class Ring;
    int fd_ = -1;
    void* bytes_ = nullptr;
    uint32_t size_ = 0;
    uint64_t offset_ = 0;
  };

  // Null where the system has no such queues, or none for this process.
  static std::unique_ptr<Ring> Open();
  // Whether there are reads of a file that fail where they would have to wait.
  static bool CanRead(int fd);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void Read(int fd, void* bytes, size_t size, uint64_t offset, Asked* asked);
  // Hands over what was asked for, as far as there is room, and waits until so many are done, or as
  // many as are under way. It may have to be asked again.
  bool Enter(unsigned at_least);
  // Tells those that are done; whether there are any.
  bool TakeDone();

 private:
  Ring() = default;
  void Push(Asked* asked);  // null: nothing, which is done at once
  static int Now(const Asked& asked);

  int fd_ = -1;
  std::deque<Asked*> waiting_;
  unsigned flying_ = 0;  // handed over, and not known to be done
  bool held_ = false;    // the system took no more, and nothing was done since
  // Shared with the kernel: what is asked for, and what is done.
  char* queue_ = nullptr;
  void* entries_ = nullptr;
  size_t queue_bytes_ = 0, entry_bytes_ = 0;
  unsigned mask_ = 0, done_mask_ = 0;
  unsigned *head_ = nullptr, *tail_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  const void* done_ = nullptr;
};

}  // namespace heterps::ps
