// driver OP ROUNDS SEED: rounds of one op, or of `all`, on cases of chance beside its CPU twin.
// Prints the kernels that ran.
#include <cstdio>
#include <exception>
#include <string>

#include "check.h"
#include "device.h"

namespace heterps {
std::mt19937_64 chance;
}

int main(int count, char** words) {
  using namespace heterps;
  const struct {
    const char* name;
    void (*fuzz)();
  } ops[] = {{"machine", fuzz_machine},        {"route", fuzz_route},
             {"gather", fuzz_gather},          {"embedding", fuzz_embedding},
             {"quantize", fuzz_quantize},      {"row_cache", fuzz_row_cache},
             {"grouped_ffn", fuzz_grouped_ffn}};
  if (count != 4) return std::fprintf(stderr, "driver OP ROUNDS SEED\n"), 2;
  const std::string wanted = words[1];
  bool known = false;
  for (const auto& [name, fuzz] : ops) {
    if (wanted != "all" && wanted != name) continue;
    known = true;
    for (uint64_t round = 0; round < std::stoull(words[2]); ++round) {
      const uint64_t seed = std::stoull(words[3]) + round;
      chance.seed(seed);
      try {
        fuzz();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s, seed %llu: %s\n", name, static_cast<unsigned long long>(seed),
                     error.what());
        return 1;
      }
    }
  }
  std::fputs(emulate::launched().c_str(), stdout);
  return known ? 0 : 2;
}
