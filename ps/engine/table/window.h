// Which pushes have been applied: exactly once for each (client, epoch, sequence).
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace heterps::ps {

// A client's pushes may arrive in any order and any number of times. Those within kWidth of the
// highest seen are told apart exactly; an older one, or one of an earlier epoch, is refused
// rather than guessed at.
class Window {
 public:
  static constexpr uint64_t kWidth = 16384;

  enum class Verdict { kNew = 0, kRepeated = 1, kTooOld = 2, kEarlierEpoch = 3 };

  struct Client {
    std::string name;
    uint64_t epoch = 0;
    uint64_t highest = 0;
    std::array<uint64_t, kWidth / 64> bits{};  // of sequence s: bit s % kWidth
  };

  // kNew also records it.
  Verdict Mark(std::string_view client, uint64_t epoch, uint64_t sequence);
  void Unmark(std::string_view client, uint64_t epoch, uint64_t sequence);

  size_t size() const;                 // clients
  std::vector<Client> Export() const;  // most recently heard first
  // Adds what another window has seen, of the same pushes or of others.
  void Merge(std::vector<Client> clients);

 private:
  mutable std::mutex mutex_;
  std::list<Client> clients_;  // most recently heard first
  std::unordered_map<std::string_view, std::list<Client>::iterator> by_name_;
};

}  // namespace heterps::ps
