// Rows that are kept on SSD: fixed-size records in one unnamed file for each table.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

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
  void Write(const void* from, size_t size, uint64_t offset);  // Throws Broken.
  uint64_t bytes() const { return end_.load(std::memory_order_relaxed); }

 private:
  int fd_ = -1;
  std::mutex reserving_;
  std::atomic<uint64_t> end_{0};
  std::atomic<bool> full_{false};
};

// One sub-table's records in it, grouped into extents, so that neighbours are written and read
// together. A record begins with its key; an unused one has the generation zero. Not thread-safe.
class DiskRows {
 public:
  struct Head {
    uint64_t key;
    uint32_t generation;
    uint32_t full;
  };

  DiskRows(DiskFile& file, size_t body_bytes);

  size_t record_bytes() const { return record_bytes_; }
  size_t size() const { return size_; }
  uint32_t end() const { return end_; }

  // A slot to write; lowest first, so that batches lie together. Throws DiskFull.
  uint32_t Take();
  void Remove(uint32_t slot);
  // Between Take or Remove and this, the lowest free slot may not be known.
  void SortFree();

  void Read(uint32_t slot, char* record) const { ReadMany(slot, 1, record); }
  // Records of consecutive slots.
  void ReadMany(uint32_t first, uint32_t count, char* records) const;
  void WriteMany(uint32_t first, uint32_t count, const char* records);
  // How many consecutive slots from `first` lie together in the file.
  static uint32_t Together(uint32_t first) { return kExtent - first % kExtent; }

 private:
  static constexpr uint32_t kExtent = 1024;

  uint64_t OffsetOf(uint32_t slot) const {
    return extents_[slot / kExtent] + uint64_t{slot % kExtent} * record_bytes_;
  }

  DiskFile& file_;
  size_t record_bytes_;
  uint32_t end_ = 0;
  size_t size_ = 0;
  std::vector<uint64_t> extents_;
  std::vector<uint32_t> free_;  // descending after SortFree
};

}  // namespace heterps::ps
