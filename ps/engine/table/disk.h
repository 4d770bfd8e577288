// Rows that are kept on SSD: fixed-size records in one unnamed file for each table.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "table/reads.h"

namespace heterps::ps {

// The disk has no room for more rows.
class DiskFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A change of a table began and could not be finished: the table is no longer whole.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The file of a table. It has no name, so it ends with the process: what must survive is in
// checkpoints and logs. Thread-safe.
class DiskFile {
 public:
  // An empty directory means: none, and nothing may be demoted.
  explicit DiskFile(const std::string& directory);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  bool usable() const { return fd_ >= 0; }
  // Room at the end of the file, on the disk too: what is written there later finds it. Throws
  // DiskFull.
  uint64_t Reserve(size_t bytes);
  // Whether the last Reserve found no room.
  bool full() const { return full_.load(std::memory_order_relaxed); }
  void set_full(bool full) { full_.store(full, std::memory_order_relaxed); }
  void Read(void* to, size_t size, uint64_t offset) const;
  // Has it be read in the background, as it will be needed: many at once, where Read waits for one.
  // Past the page cache that is what queues are for.
  void Expect(size_t size, uint64_t offset) const;
  void Write(const void* from, size_t size, uint64_t offset);  // Throws Broken.
  uint64_t bytes() const { return end_.load(std::memory_order_relaxed); }

  // What reads and writes past the page cache begin and end at; 1 where they go through it. There
  // Write wants memory at such places, too.
  size_t block() const { return block_; }
  // A queue of reads past the page cache, to be given back; null where there is none.
  std::unique_ptr<Ring> Lend();
  void Return(std::unique_ptr<Ring> ring);
  std::unique_ptr<Fetched> Fetch(Ring& ring) const {
    return std::make_unique<Fetched>(ring, fd_, align_);
  }

 private:
  void ReadAll(void* to, size_t size, uint64_t offset) const;
  void MakeReady(size_t bytes);  // that many more. Throws DiskFull.

  int fd_ = -1;
  size_t align_ = 1;  // of reads
  size_t block_ = 1;  // of writes, and of the file system: others wait for all reads to end
  std::mutex lending_;
  std::vector<std::unique_ptr<Ring>> idle_;
  std::mutex reserving_;
  uint64_t ready_ = 0;  // up to where all may be written
  std::atomic<uint64_t> end_{0};
  std::atomic<bool> full_{false};
};

// One sub-table's records in it, as logs: extents that are filled one after the other, so that
// neighbours are written together, and filled again once nothing in them is in use. Which slots are
// is known in memory. Not thread-safe.
class DiskRows {
 public:
  struct __attribute__((packed)) Head {
    uint64_t key;
    uint32_t generation : 31;
    uint32_t full : 1;
    uint8_t heat;  // the count, and the round of halving it is of
    uint8_t round;
  };
  // Rows that have just left memory, and those that have stayed on disk when all around them went:
  // apart, so that what goes soon does not lie among what stays.
  enum Log : uint32_t { kFresh, kSettled };

  DiskRows(DiskFile& file, size_t body_bytes);

  size_t record_bytes() const { return record_bytes_; }
  size_t size() const { return size_; }
  uint32_t end() const { return static_cast<uint32_t>(extents_.size()) * kExtent; }
  bool used(uint32_t slot) const {
    return extents_[slot / kExtent].bits[slot % kExtent / 64] >> slot % 64 & 1;
  }

  // Whether a log has room in what it is filling.
  bool has_room(Log log);
  // Has it have room. Throws DiskFull.
  void MakeRoom(Log log);
  // The slot that Take is to give, behind the one before it where that can be; the log must have
  // room.
  uint32_t next(Log log) const { return open_[log].extent * kExtent + open_[log].next; }
  uint32_t Take(Log log);
  void Remove(uint32_t slot);
  // The first slot of the extent that is best emptied, where too many slots of all are not in use
  // and the logs are about to need another extent. So many rows more are in memory.
  std::optional<uint32_t> Sparse(size_t in_memory) const;

  void Read(uint32_t slot, char* record) const { ReadMany(slot, 1, record); }
  // Has a record be read for later: with others, or where that is null into the page cache.
  void Expect(uint32_t slot, Fetched* with) const {
    if (with) {
      with->Add(slot, VersionOf(slot), record_bytes_, OffsetOf(slot));
    } else {
      file_.Expect(record_bytes_, OffsetOf(slot));
    }
  }
  // A record that was read so, if it is still what the slot has.
  const char* Find(uint32_t slot, const Fetched& in) const {
    return in.Find(slot, VersionOf(slot));
  }
  // Records of consecutive slots; of those that are not used they say nothing.
  void ReadMany(uint32_t first, uint32_t count, char* records) const;
  // Of slots that were taken and not written since.
  void WriteMany(uint32_t first, uint32_t count, const char* records);
  // Of slots that have other records.
  void Rewrite(uint32_t first, uint32_t count, const char* records);
  // How many consecutive slots from `first` lie together in the file.
  static uint32_t Together(uint32_t first) { return kExtent - first % kExtent; }

 private:
  static constexpr uint32_t kExtent = 256;  // few, so that what is not in use of two is little

  struct Extent {
    uint64_t offset;
    std::array<uint64_t, kExtent / 64> bits{};
  };
  struct Open {  // what a log is filling
    bool any = false;
    uint32_t extent = 0, next = 0;
  };

  // The same as long as the slot, while it is in use, has the same record: a log fills an extent in
  // order, so that one that was removed is taken again when another log has begun it, not before.
  uint32_t VersionOf(uint32_t slot) const { return versions_[slot / kExtent]; }
  uint64_t OffsetOf(uint32_t slot) const {
    return extents_[slot / kExtent].offset + uint64_t{slot % kExtent} * record_bytes_;
  }
  // What a write of slots does not fill of the block at that offset.
  void Complete(uint64_t offset, uint32_t first, uint32_t count, char* block) const;
  bool is_open(uint32_t extent) const {
    return std::any_of(open_.begin(), open_.end(),
                       [&](const Open& one) { return one.any && one.extent == extent; });
  }
  // The extent with the fewest slots in use, of those that have any and no log is filling.
  std::optional<uint32_t> Emptiest() const;
  // The extent that is best emptied: what that gains for long, over what it costs, as
  // log-structured file systems choose (Rosenblum and Ousterhout, 1992). What has long been there
  // will stay so.
  std::optional<uint32_t> Best() const;
  void OpenNext(Log log);  // Throws DiskFull.
  void Begin(Log log, uint32_t extent);
  void AddExtent();  // Throws DiskFull.

  DiskFile& file_;
  size_t body_bytes_, record_bytes_;
  size_t size_ = 0;
  std::vector<Extent> extents_;
  std::vector<uint32_t> in_use_;  // slots of each, apart: all are looked through
  std::vector<uint32_t> versions_;
  std::vector<uint64_t> opened_at_;  // when each was last begun, by how many had been
  uint64_t opened_ = 0;
  std::vector<uint32_t> empty_;  // extents that no log is filling
  std::array<Open, 2> open_;
  // Blocks that were last written in part: what comes next goes there, and need not read them.
  struct Edge {
    std::optional<uint64_t> offset;
    Block bytes;
  };
  std::array<Edge, 2> edges_;
};

}  // namespace heterps::ps
