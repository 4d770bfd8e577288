#include "table/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace heterps::ps {
namespace {

[[noreturn]] void Fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

constexpr uint32_t kMaxSlots = (1u << 30) - 1;  // two bits of a place say where its row is
constexpr double kSpace = 1.42;  // times the bytes of all rows, in memory too: a longer file is
constexpr size_t kSlack = 3;     // tidied, if it has more extents than this besides full ones
constexpr size_t kSpare = 2;     // empty extents: one for what is moved, which is to leave one
constexpr size_t kMostBlock = 16 << 10;  // a file system of larger ones caches pages
constexpr size_t kReadyAtOnce = 1 << 20;
alignas(kMostBlock) char kZeros[kReadyAtOnce];  // only read, and so no memory of its own
constexpr double kSparse = 0.9;  // of an extent in use: emptying one of more gains too little

// Has appending to it throw nothing up to so many.
template <typename T>
void HaveRoom(std::vector<T>* of, size_t count) {
  if (of->capacity() < count) of->reserve(std::max(count, 2 * of->capacity()));
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
#ifdef STATX_DIOALIGN
  struct statx told{};
  std::unique_ptr<Ring> queue = Ring::Open();
  if (queue && ::statx(fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &told) == 0 &&
      told.stx_mask & STATX_DIOALIGN && told.stx_dio_offset_align > 0 &&
      told.stx_blksize <= kMostBlock && Ring::CanRead(fd_) &&
      ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_DIRECT) == 0) {
    align_ = std::max(told.stx_dio_offset_align, told.stx_dio_mem_align);
    block_ = std::max<size_t>(align_, told.stx_blksize);
    idle_.push_back(std::move(queue));
    return;
  }
#endif
#ifdef POSIX_FADV_RANDOM
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // neighbours of a row are not wanted
#endif
}

DiskFile::~DiskFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::unique_ptr<Ring> DiskFile::Lend() {
  if (block_ == 1) return nullptr;
  {
    std::lock_guard lock(lending_);
    if (!idle_.empty()) {
      std::unique_ptr<Ring> out = std::move(idle_.back());
      idle_.pop_back();
      return out;
    }
  }
  return Ring::Open();
}

void DiskFile::Return(std::unique_ptr<Ring> ring) {
  std::lock_guard lock(lending_);
  if (ring) idle_.push_back(std::move(ring));
}

void DiskFile::Read(void* data, size_t size, uint64_t offset) const {
  if (align_ == 1) return ReadAll(data, size, offset);
  const Span span = Around(offset, size, align_);
  const Block block = BlockOf(align_, span.size);
  ReadAll(block.get(), span.size, span.begin);
  std::memcpy(data, block.get() + (offset - span.begin), size);
}

void DiskFile::ReadAll(void* data, size_t size, uint64_t offset) const {
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = ::pread(fd_, to, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) Fail("a row on disk cannot be read");
    if (done == 0) throw std::runtime_error("a row on disk cannot be read: the file ends early");
    to += done, size -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
  }
}

void DiskFile::Expect(size_t size, uint64_t offset) const {
  if (block_ > 1) return;
#ifdef POSIX_FADV_WILLNEED
  ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(size), POSIX_FADV_WILLNEED);
#endif
}

void DiskFile::Write(const void* data, size_t size, uint64_t offset) {
  auto* from = static_cast<const char*>(data);
  const uint64_t begin = offset, bytes = size;
  while (size > 0) {
    const ssize_t done = ::pwrite(fd_, from, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw Broken(std::string("a row cannot be written to disk: ") + strerror(errno));
    from += done, size -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
  }
  if (block_ > 1) return;
#ifdef SYNC_FILE_RANGE_WRITE
  // Else pages that wait to be written fill what memory a control group leaves to them, and who
  // asks for more sleeps until they are. The last one, too, though it may be written to again.
  ::sync_file_range(fd_, static_cast<off_t>(begin), static_cast<off_t>(bytes),
                    SYNC_FILE_RANGE_WRITE);
#else
  (void)begin, (void)bytes;
#endif
}

uint64_t DiskFile::Reserve(size_t bytes) {
  std::lock_guard lock(reserving_);
  const uint64_t offset = end_.load(std::memory_order_relaxed);
  if (offset + bytes > ready_) {
    try {
      MakeReady(std::max(bytes, block_ > 1 ? kReadyAtOnce : 0));
    } catch (const DiskFull&) {
      MakeReady(bytes);
    }
  }
  set_full(false);
  end_.store(offset + bytes, std::memory_order_relaxed);
  return offset;
}

void DiskFile::MakeReady(size_t bytes) {
  const int error = ::posix_fallocate(fd_, static_cast<off_t>(ready_), static_cast<off_t>(bytes));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    set_full(true);
    throw DiskFull(std::string("no room for rows on disk: ") + std::strerror(error));
  }
  if (error != 0 && error != EINVAL && error != EOPNOTSUPP) {  // else it cannot be reserved
    errno = error;
    Fail("room for rows on disk cannot be reserved");
  }
  if (block_ > 1) {  // who writes for the first time where nothing was has all reads wait for it
    for (size_t done = 0; done < bytes; done += kReadyAtOnce) {
      Write(kZeros, std::min(kReadyAtOnce, bytes - done), ready_ + done);
    }
  }
  ready_ += bytes;
}

DiskRows::DiskRows(DiskFile& file, size_t body_bytes)
    : file_(file),
      body_bytes_(body_bytes),
      record_bytes_((sizeof(Head) + body_bytes + 3) / 4 * 4) {}

bool DiskRows::has_room(Log log) {
  Open& open = open_[log];
  while (open.any && open.next < kExtent && used(open.extent * kExtent + open.next)) ++open.next;
  return open.any && open.next < kExtent;
}

void DiskRows::MakeRoom(Log log) {
  while (!has_room(log)) OpenNext(log);
}

uint32_t DiskRows::Take(Log log) {
  Open& open = open_[log];
  const uint32_t slot = next(log);
  ++open.next;
  extents_[open.extent].bits[slot % kExtent / 64] |= uint64_t{1} << slot % 64;
  ++in_use_[open.extent], ++size_;
  return slot;
}

void DiskRows::OpenNext(Log log) {
  Open& open = open_[log];
  if (open.any) {
    open.any = false;
    if (in_use_[open.extent] == 0) empty_.push_back(open.extent);
  }
  if (empty_.empty()) {
    try {
      AddExtent();
    } catch (const DiskFull&) {
      // Holes are left. What is only moved has none to gain.
      const std::optional<uint32_t> emptiest = Emptiest();
      if (log == kSettled || !emptiest || in_use_[*emptiest] == kExtent) throw;
      file_.set_full(false);
      return Begin(log, *emptiest);
    }
  }
  const uint32_t extent = empty_.back();
  empty_.pop_back();
  Begin(log, extent);
}

void DiskRows::Begin(Log log, uint32_t extent) {
  open_[log] = {true, extent, 0};
  opened_at_[extent] = ++opened_;
  ++versions_[extent];
}

void DiskRows::AddExtent() {
  const size_t count = extents_.size() + 1;
  if (count * kExtent > kMaxSlots) {
    throw std::runtime_error("a sub-table cannot hold more than 2^30 rows on disk");
  }
  // First, so that nothing is half done where there is no memory, and Remove never needs any.
  HaveRoom(&extents_, count), HaveRoom(&in_use_, count), HaveRoom(&opened_at_, count),
      HaveRoom(&versions_, count), HaveRoom(&empty_, count);
  extents_.push_back({file_.Reserve(Around(0, kExtent * record_bytes_, file_.block()).size)});
  in_use_.push_back(0);
  versions_.push_back(0);
  opened_at_.push_back(0);
  empty_.push_back(static_cast<uint32_t>(count) - 1);
}

void DiskRows::Remove(uint32_t slot) {
  const uint32_t extent = slot / kExtent;
  extents_[extent].bits[slot % kExtent / 64] &= ~(uint64_t{1} << slot % 64);
  --in_use_[extent], --size_;
  if (in_use_[extent] == 0 && !is_open(extent)) empty_.push_back(extent);
}

std::optional<uint32_t> DiskRows::Emptiest() const {
  std::optional<uint32_t> found;
  uint32_t fewest = UINT32_MAX;
  for (uint32_t i = 0; i < in_use_.size(); ++i) {
    if (in_use_[i] > 0 && in_use_[i] < fewest && !is_open(i)) found = i, fewest = in_use_[i];
  }
  return found;
}

std::optional<uint32_t> DiskRows::Best() const {
  std::optional<uint32_t> found;
  double most = 0;
  for (uint32_t i = 0; i < in_use_.size(); ++i) {
    if (in_use_[i] == 0 || in_use_[i] > kSparse * kExtent || is_open(i)) continue;
    const double moved = static_cast<double>(in_use_[i]) / kExtent;
    const double gain = (1 - moved) * (opened_ - opened_at_[i] + 1) / (1 + moved);
    if (gain > most) found = i, most = gain;
  }
  return found;
}

std::optional<uint32_t> DiskRows::Sparse(size_t in_memory) const {
  const double rows = static_cast<double>(size_ + in_memory) * static_cast<double>(body_bytes_) /
                      static_cast<double>(record_bytes_);
  const size_t most = std::max(static_cast<size_t>(kSpace * rows), size_ + kSlack * kExtent);
  if (empty_.size() >= kSpare || end() < most) return std::nullopt;
  const std::optional<uint32_t> found = Best();
  if (!found) return std::nullopt;
  return *found * kExtent;
}

void DiskRows::ReadMany(uint32_t first, uint32_t count, char* records) const {
  file_.Read(records, count * record_bytes_, OffsetOf(first));
}

void DiskRows::WriteMany(uint32_t first, uint32_t count, const char* records) {
  const size_t block = file_.block(), size = count * record_bytes_;
  const uint64_t offset = OffsetOf(first);
  if (block == 1) return file_.Write(records, size, offset);
  const auto [begin, span] = Around(offset, size, block);
  const size_t before = offset - begin, filled = before + size;
  Block bytes = BlockOf(block, span);
  if (before > 0) Complete(begin, first, count, bytes.get());
  if (filled < span && (span > block || before == 0)) {
    Complete(begin + span - block, first, count, bytes.get() + span - block);
  }
  std::memcpy(bytes.get() + before, records, size);
  for (Edge& edge : edges_) {
    if (edge.offset && *edge.offset >= begin && *edge.offset < begin + span) edge.offset.reset();
  }
  file_.Write(bytes.get(), span, begin);
  if (filled == span || Together(first) == count) return;  // nothing comes there next
  Edge& edge = edges_[edges_[0].offset ? 1 : 0];
  if (!edge.bytes) edge.bytes = BlockOf(block, block);
  std::memcpy(edge.bytes.get(), bytes.get() + span - block, block);
  edge.offset = begin + span - block;
}

void DiskRows::Rewrite(uint32_t first, uint32_t count, const char* records) {
  ++versions_[first / kExtent];
  WriteMany(first, count, records);
}

void DiskRows::Complete(uint64_t offset, uint32_t first, uint32_t count, char* block) const {
  for (const Edge& edge : edges_) {
    if (edge.offset == offset) {
      std::memcpy(block, edge.bytes.get(), file_.block());
      return;
    }
  }
  const uint32_t begin = first / kExtent * kExtent;
  const uint64_t in = offset - OffsetOf(begin);
  const auto from = static_cast<uint32_t>(in / record_bytes_);
  const auto to = static_cast<uint32_t>((in + file_.block() - 1) / record_bytes_);
  for (uint32_t slot = begin + from; slot <= begin + std::min(to, kExtent - 1); ++slot) {
    if (used(slot) && (slot < first || slot >= first + count)) {
      file_.Read(block, file_.block(), offset);
      return;
    }
  }
  std::memset(block, 0, file_.block());
}

}  // namespace heterps::ps
