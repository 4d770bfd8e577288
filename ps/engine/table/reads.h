// Records that are read from disk many at once and past the page cache.
//
// Pages of a cache would be read for one record each, and where a control group caps memory the
// kernel has those who need the next ones sleep until some are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/aligned.h"
#include "table/ring.h"

namespace heterps::ps {

// Records of slots, as they were when they were asked for.
class Fetched {
 public:
  // Of a file that is open for reads of multiples of `align` bytes, to and from such places.
  Fetched(Ring& ring, int fd, size_t align) : ring_(&ring), fd_(fd), align_(align) {}
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
  struct One final : Ring::Asked {
    One(Fetched* fetched, uint64_t at, size_t bytes, uint32_t where, uint32_t when)
        : of(fetched), offset(at), size(static_cast<uint32_t>(bytes)), slot(where), version(when) {}
    void Done(int read) override;

    Fetched* of;
    uint64_t offset;  // of the record
    uint32_t size, slot, version;
    const char* record = nullptr;
    bool whole = false;
  };
  Span SpanOf(const One& one) const { return Around(one.offset, one.size, align_); }
  uint32_t* Entry(uint32_t slot);
  const uint32_t* Entry(uint32_t slot) const { return const_cast<Fetched*>(this)->Entry(slot); }

  Ring* ring_;
  int fd_;
  size_t align_;
  std::vector<One> all_;
  std::vector<uint32_t> places_;  // by slot: 0, or 1 + the place in all_
  Block bytes_;
  size_t left_ = 0;
};

}  // namespace heterps::ps
