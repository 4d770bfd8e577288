#include "table/disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace heterps::ps {
namespace {

[[noreturn]] void Fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

}  // namespace

DiskFile::DiskFile(const std::string& directory) {
  if (directory.empty()) return;
#ifdef O_TMPFILE
  fd_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
#endif
  if (fd_ < 0) {  // a file system without unnamed files
    std::string path = directory + "/rows-XXXXXX";
    fd_ = ::mkostemp(path.data(), O_CLOEXEC);
    if (fd_ < 0) Fail(directory + ": rows cannot be kept there");
    ::unlink(path.c_str());
  }
}

DiskFile::~DiskFile() {
  if (fd_ >= 0) ::close(fd_);
}

void DiskFile::Read(void* data, size_t size, uint64_t offset) const {
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = ::pread(fd_, to, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) Fail("a row on disk cannot be read");
    if (done == 0) throw std::runtime_error("a row on disk cannot be read: the file ends early");
    to += done, size -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
  }
}

void DiskFile::Write(const void* data, size_t size, uint64_t offset) {
  auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = ::pwrite(fd_, from, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw Broken(std::string("a row cannot be written to disk: ") + strerror(errno));
    from += done, size -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
  }
}

uint64_t DiskFile::Reserve(size_t bytes) {
  std::lock_guard lock(reserving_);
  const uint64_t offset = end_.load(std::memory_order_relaxed);
  const int error = ::posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    set_full(true);
    throw DiskFull(std::string("no room for rows on disk: ") + std::strerror(error));
  }
  if (error != 0 && error != EINVAL && error != EOPNOTSUPP) {  // else it cannot be reserved
    errno = error;
    Fail("room for rows on disk cannot be reserved");
  }
  set_full(false);
  end_.store(offset + bytes, std::memory_order_relaxed);
  return offset;
}

DiskRows::DiskRows(DiskFile& file, size_t body_bytes)
    : file_(file), record_bytes_((sizeof(Head) + body_bytes + 7) / 8 * 8) {}

uint32_t DiskRows::Take() {
  if (!free_.empty()) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    ++size_;
    return slot;
  }
  if (end_ % kExtent == 0) extents_.push_back(file_.Reserve(kExtent * record_bytes_));
  ++size_;
  return end_++;
}

void DiskRows::Remove(uint32_t slot) {
  // Whoever scans the file must see that the record is gone.
  const Head gone{};
  file_.Write(&gone, sizeof(gone), OffsetOf(slot));
  free_.push_back(slot);
  --size_;
}

void DiskRows::SortFree() { std::sort(free_.begin(), free_.end(), std::greater<>()); }

void DiskRows::ReadMany(uint32_t first, uint32_t count, char* records) const {
  file_.Read(records, count * record_bytes_, OffsetOf(first));
}

void DiskRows::WriteMany(uint32_t first, uint32_t count, const char* records) {
  file_.Write(records, count * record_bytes_, OffsetOf(first));
}

}  // namespace heterps::ps
