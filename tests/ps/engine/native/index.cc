// The index beside a map of the standard library, with slots of few bits and of all they may have.
#include "table/index.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <unordered_map>
#include <vector>

#include "table/arena.h"

namespace {

using heterps::ps::Arena;
using heterps::ps::Index;

constexpr uint32_t kKinds = 4, kSlotBits = 30;

[[noreturn]] void Fail(const char* what, uint64_t hash) {
  std::fprintf(stderr, "%s: hash %llx\n", what, static_cast<unsigned long long>(hash));
  std::exit(1);
}

// All that a hash finds must be its own place, but for so many others of a million.
void Check(const Index& index, const std::unordered_map<uint64_t, uint32_t>& places, double most) {
  size_t others = 0;
  for (const auto& [hash, place] : places) {
    const auto found = index.Find(hash, [&](uint32_t at) {
      others += at != place;
      return at == place;
    });
    if (found != place) Fail("not found", hash);
  }
  if (1e6 * static_cast<double>(others) > most * static_cast<double>(places.size())) {
    Fail("too many others", others);
  }
}

}  // namespace

int main() {
  Arena arena(false, false);
  Index index(arena, 0.9, 1.25);
  std::unordered_map<uint64_t, uint32_t> places;
  std::vector<uint64_t> hashes;
  std::mt19937_64 random(1);
  const auto place_of = [&](uint32_t bits) {
    const auto slot = static_cast<uint32_t>(random() & ((1u << bits) - 1));
    return static_cast<uint32_t>(random() % kKinds) << kSlotBits | slot;
  };
  for (uint32_t bits = 18; bits <= kSlotBits; ++bits) {
    for (int step = 0; step < 20000; ++step) {
      const bool known = !hashes.empty() && random() % 3 == 0;
      if (!known) {
        if (index.full()) {
          index.Grow();
          for (const auto& [hash, place] : places) index.Insert(hash, place);
        }
        const uint64_t hash = random();
        hashes.push_back(hash);
        index.Insert(hash, places[hash] = place_of(bits));
        continue;
      }
      const size_t at = random() % hashes.size();
      const uint64_t hash = hashes[at];
      if (random() % 2) {
        const uint32_t to = place_of(bits);
        index.Replace(hash, places[hash], to);
        places[hash] = to;
      } else {
        index.Erase(hash, places[hash]);
        places.erase(hash);
        hashes[at] = hashes.back();
        hashes.pop_back();
      }
    }
    if (index.size() != places.size()) Fail("size", index.size());
    Check(index, places, bits <= 22 ? 1000 : 1e6);
  }
  return 0;
}
