#include "table/writes.h"

namespace heterps::ps {

void Written::Done(int written) {
  const bool whole = written >= 0 && static_cast<size_t>(written) == span_.size;
  state_.store(whole ? State::kWhole : State::kFailed, std::memory_order_release);
}

// Whoever waits keeps others from beginning writes: what is done might be told to them alone.
Written::State Written::Wait() {
  while (state() == State::kUnderWay) {
    std::lock_guard lock(of_.mutex_);
    of_.ring_->TakeDone();
    if (state() == State::kUnderWay) of_.ring_->Enter(1);
  }
  return state();
}

std::unique_ptr<Written> Writes::Begin(int fd, Block bytes, Span span,
                                       std::shared_ptr<const void> holds) {
  auto out = std::make_unique<Written>(*this, std::move(bytes), span, std::move(holds));
  std::lock_guard lock(mutex_);
  ring_->TakeDone();
  ring_->Push(Ring::What::kWrite, fd, out->bytes_.get(), span.size, span.begin, out.get());
  ring_->Enter(0);
  return out;
}

void Writes::Look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);  // whoever has it looks, too
  if (lock) ring_->TakeDone();
}

}  // namespace heterps::ps
