// Writes past the page cache that nobody waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "table/aligned.h"
#include "table/ring.h"

namespace heterps::ps {

class Writes;

// One of them. It has its bytes until it ends, which waits until it is done.
class Written final : public Ring::Asked {
 public:
  enum class State { kUnderWay, kWhole, kFailed };

  // `holds` ends with it.
  Written(Writes& of, Block bytes, Span span, std::shared_ptr<const void> holds)
      : of_(of), bytes_(std::move(bytes)), span_(span), holds_(std::move(holds)) {}
  ~Written() { Wait(); }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;

  const char* bytes() const { return bytes_.get(); }
  Span span() const { return span_; }
  State state() const { return state_.load(std::memory_order_acquire); }
  // What has become of it; never kUnderWay.
  State Wait();

 private:
  friend class Writes;
  void Done(int written) override;

  Writes& of_;
  Block bytes_;
  Span span_;
  std::shared_ptr<const void> holds_;
  std::atomic<State> state_{State::kUnderWay};
};

// Those of a file. Thread-safe.
class Writes {
 public:
  explicit Writes(std::unique_ptr<Ring> ring) : ring_(std::move(ring)) {}

  std::unique_ptr<Written> Begin(int fd, Block bytes, Span span, std::shared_ptr<const void> holds);
  // Has writes that are done say so.
  void Look();

 private:
  friend class Written;

  std::mutex mutex_;
  std::unique_ptr<Ring> ring_;
};

}  // namespace heterps::ps
