#include "table/window.h"

#include <utility>

namespace heterps::ps {
namespace {

uint64_t& Word(Window::Client& c, uint64_t sequence) {
  return c.bits[sequence % Window::kWidth / 64];
}
uint64_t Bit(uint64_t sequence) { return uint64_t{1} << (sequence % 64); }

}  // namespace

Window::Verdict Window::Mark(std::string_view client, uint64_t epoch, uint64_t sequence) {
  std::lock_guard lock(mutex_);
  auto found = by_name_.find(client);
  if (found == by_name_.end()) {
    clients_.push_front(Client{.name = std::string(client), .epoch = epoch, .highest = 0});
    found = by_name_.emplace(clients_.front().name, clients_.begin()).first;
  } else {
    clients_.splice(clients_.begin(), clients_, found->second);
  }
  Client& c = *found->second;
  if (epoch < c.epoch) return Verdict::kEarlierEpoch;
  if (epoch > c.epoch) {
    c.epoch = epoch;
    c.highest = 0;
    c.bits = {};
  }
  if (sequence > c.highest) {
    if (sequence - c.highest >= kWidth) {
      c.bits = {};
    } else {
      for (uint64_t s = c.highest + 1; s <= sequence; ++s) Word(c, s) &= ~Bit(s);
    }
    c.highest = sequence;
  } else if (c.highest - sequence >= kWidth) {
    return Verdict::kTooOld;
  } else if (Word(c, sequence) & Bit(sequence)) {
    return Verdict::kRepeated;
  }
  Word(c, sequence) |= Bit(sequence);
  return Verdict::kNew;
}

void Window::Unmark(std::string_view client, uint64_t epoch, uint64_t sequence) {
  std::lock_guard lock(mutex_);
  auto found = by_name_.find(client);
  if (found == by_name_.end() || found->second->epoch != epoch) return;
  Client& c = *found->second;
  if (c.highest - sequence < kWidth) Word(c, sequence) &= ~Bit(sequence);
}

size_t Window::size() const {
  std::lock_guard lock(mutex_);
  return clients_.size();
}

std::vector<Window::Client> Window::Export() const {
  std::lock_guard lock(mutex_);
  return {clients_.begin(), clients_.end()};
}

void Window::Merge(std::vector<Client> clients) {
  std::lock_guard lock(mutex_);
  for (Client& other : clients) {
    auto found = by_name_.find(other.name);
    if (found == by_name_.end()) {
      clients_.push_back(std::move(other));
      by_name_.emplace(clients_.back().name, std::prev(clients_.end()));
      continue;
    }
    Client& ours = *found->second;
    if (other.epoch < ours.epoch) continue;
    if (other.epoch > ours.epoch) {
      ours.epoch = other.epoch;
      ours.highest = other.highest;
      ours.bits = other.bits;
      continue;
    }
    // Of both, the bits within the width of the higher one.
    Client& ahead = ours.highest >= other.highest ? ours : other;
    const Client& behind = ours.highest >= other.highest ? other : ours;
    const uint64_t first = ahead.highest >= kWidth ? ahead.highest - kWidth + 1 : 0;
    for (uint64_t s = first; s <= behind.highest; ++s) {
      if (behind.highest - s < kWidth && (behind.bits[s % kWidth / 64] & Bit(s))) {
        Word(ahead, s) |= Bit(s);
      }
    }
    ours.highest = ahead.highest;
    ours.bits = ahead.bits;
  }
}

}  // namespace heterps::ps
