// Rows on disk. All integers are little-endian.
//
//   offset  size  field
//        0     8  magic "HPSROWS\n"
//        8     4  version, 1
//       12     4  dim: weights a row
//       16     4  state width: optimizer floats a row
//       20     4  optimizer: 0 sgd, 1 adagrad, 2 adam
//       24     8  count of rows
//       32     4  length of the table's spec
//       36    28  zero
//       64     -  the spec: a serialized heterps.v1.TableSpec
//        -     -  count records: key (uint64), dim weights, state width floats (float32)
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "table.h"

namespace heterps::ps {
namespace {

constexpr char kMagic[8] = {'H', 'P', 'S', 'R', 'O', 'W', 'S', '\n'};
constexpr uint32_t kVersion = 1;
constexpr size_t kBuffer = 1 << 20;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t dim;
  uint32_t state_width;
  uint32_t optimizer;
  uint64_t count;
  uint32_t spec_bytes;
  char zero[28];
};
static_assert(sizeof(Header) == 64);

class File {
 public:
  File(const std::string& path, int flags) : path_(path), fd_(::open(path.c_str(), flags, 0644)) {
    if (fd_ < 0) Fail("cannot be opened");
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void Write(const void* data, size_t size, off_t offset) {
    auto* from = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t done = ::pwrite(fd_, from, size, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) Fail("cannot be written");
      from += done, size -= static_cast<size_t>(done), offset += done;
    }
  }
  void Read(void* data, size_t size, off_t offset) {
    auto* to = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t done = ::pread(fd_, to, size, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) Fail("cannot be read");
      if (done == 0) throw std::invalid_argument(path_ + ": ends early");
      to += done, size -= static_cast<size_t>(done), offset += done;
    }
  }
  void Sync() {
    if (::fsync(fd_) != 0) Fail("cannot be synced to disk");
  }
  uint64_t Size() {
    struct stat info;
    if (::fstat(fd_, &info) != 0) Fail("cannot be examined");
    return static_cast<uint64_t>(info.st_size);
  }

 private:
  [[noreturn]] void Fail(const char* what) {
    throw std::runtime_error(path_ + ": " + what + ": " + std::strerror(errno));
  }
  std::string path_;
  int fd_;
};

void Expect(const std::string& path, const char* what, uint64_t got, uint64_t expected) {
  if (got == expected) return;
  throw std::invalid_argument(path + ": " + what + " is " + std::to_string(got) + ", expected " +
                              std::to_string(expected));
}

}  // namespace

uint64_t Table::Save(const std::string& path, std::string_view spec) {
  File file(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.dim = static_cast<uint32_t>(dim_);
  header.state_width = static_cast<uint32_t>(state_width());
  header.optimizer = static_cast<uint32_t>(optimizer_.kind);
  header.spec_bytes = static_cast<uint32_t>(spec.size());
  file.Write(spec.data(), spec.size(), sizeof(header));

  const size_t row_bytes = width_ * sizeof(float);
  std::vector<char> buffer;
  buffer.reserve(kBuffer + 8 + row_bytes);
  off_t offset = static_cast<off_t>(sizeof(header) + spec.size());
  auto flush = [&] {
    file.Write(buffer.data(), buffer.size(), offset);
    offset += static_cast<off_t>(buffer.size());
    buffer.clear();
  };
  for (Subtable& sub : subtables_) {
    std::lock_guard lock(sub.mutex);
    sub.rows->ForEach([&](uint64_t key, const float* row) {
      const auto* k = reinterpret_cast<const char*>(&key);
      const auto* r = reinterpret_cast<const char*>(row);
      buffer.insert(buffer.end(), k, k + 8);
      buffer.insert(buffer.end(), r, r + row_bytes);
      ++header.count;
      if (buffer.size() >= kBuffer) flush();
    });
  }
  flush();
  // The header last: pulls may have grown rows meanwhile, and a file cut short has no magic.
  file.Write(&header, sizeof(header), 0);
  file.Sync();
  return header.count;
}

uint64_t Table::Load(const std::string& path, uint32_t shard, uint32_t shards) {
  File file(path, O_RDONLY | O_CLOEXEC);
  Header header;
  const uint64_t size = file.Size();
  if (size < sizeof(header)) throw std::invalid_argument(path + ": too short for a header");
  file.Read(&header, sizeof(header), 0);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    throw std::invalid_argument(path + ": not a file of rows (wrong magic)");
  }
  Expect(path, "version", header.version, kVersion);
  Expect(path, "dim", header.dim, dim_);
  Expect(path, "optimizer", header.optimizer, static_cast<uint32_t>(optimizer_.kind));
  Expect(path, "state width", header.state_width, state_width());
  const size_t record = 8 + width_ * sizeof(float);
  const uint64_t body = size - sizeof(header);
  if (header.spec_bytes > body || (body - header.spec_bytes) / record != header.count ||
      (body - header.spec_bytes) % record != 0) {
    throw std::invalid_argument(path + ": has " + std::to_string(size) +
                                " bytes, which is not a header and " +
                                std::to_string(header.count) + " rows");
  }
  const size_t batch = std::max<size_t>(kBuffer / record, 1);
  std::vector<char> buffer(batch * record);
  auto offset = static_cast<off_t>(sizeof(header) + header.spec_bytes);
  uint64_t kept = 0;
  for (uint64_t left = header.count; left > 0;) {
    const size_t n = std::min<uint64_t>(left, batch);
    file.Read(buffer.data(), n * record, offset);
    offset += static_cast<off_t>(n * record);
    left -= n;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = LoadKey(buffer.data() + i * record, 0);
      const uint64_t hash = Mix(key);
      if (ShardOf(hash, shards) != shard) continue;
      Subtable& sub = subtables_[SubtableOf(hash)];
      std::lock_guard lock(sub.mutex);
      float* row = sub.rows->at(sub.rows->FindOrCreate(key, hash, 0).row);
      std::memcpy(row, buffer.data() + i * record + 8, width_ * sizeof(float));
      ++kept;
    }
  }
  return kept;
}

}  // namespace heterps::ps
