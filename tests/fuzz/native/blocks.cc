// Blocks of rows, as they come from a file or another shard, given to tables by libFuzzer. The
// first byte of an input chooses the table, the rest is the block; without its heading it gets a
// right one, which mutations seldom leave whole.
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "table/block.h"
#include "table/table.h"

namespace {

using namespace heterps::ps;

Options OptionsOf(uint8_t choice) {
  Segment wide, deep;
  wide.dim = 1;
  deep.dim = 3;
  for (Segment* segment : {&wide, &deep}) {
    segment->optimizer.kind = choice & 1 ? Optimizer::Kind::kAdagrad : Optimizer::Kind::kSgd;
    segment->optimizer.learning_rate = 1;
    segment->initializer.kind = Initializer::Kind::kZeros;
  }
  const Dtype dtype = choice & 2 ? Dtype::kInt8 : Dtype::kFloat32;
  Options options{Layout({wide, deep}, dtype, false), {}, {}, {}, 0, ""};
  if (choice & 4) {
    options.admission.kind = Admission::Kind::kCount;
    options.admission.threshold = 2;
  }
  if (choice & 8) options.eviction.max_rows = 8;
  return options;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  Table table(OptionsOf(data[0]));
  const bool headed = data[1] & 1;
  std::vector<uint8_t> block(data + 2, data + size);  // ends where its memory does
  if (!headed && size >= 2 + 2 * sizeof(uint32_t)) {
    BlockHeader header{};
    std::memcpy(header.magic, kBlockMagic, sizeof(kBlockMagic));
    header.kind = data[2] % 7;
    header.usage = data[3] & 1;
    header.subtable = data[4];
    const size_t body = size - 6;
    header.count = 1 + data[5] % 4;
    header.record_bytes = static_cast<uint32_t>(body / header.count);
    block.resize(sizeof(header) + size_t{header.count} * header.record_bytes);
    std::memcpy(block.data(), &header, sizeof(header));
    std::memcpy(block.data() + sizeof(header), data + 6, block.size() - sizeof(header));
    block.shrink_to_fit();
  }
  try {
    table.Absorb(block.data(), block.size(), nullptr);
  } catch (const std::invalid_argument&) {
    return 0;
  }
  // What was taken can be read, pushed to, saved and taken again.
  const std::vector<uint64_t> keys = table.Keys(100);
  std::vector<float> rows(keys.size() * table.dim());
  PullBatch pull;
  pull.out = reinterpret_cast<char*>(rows.data());
  table.Pull(keys.data(), keys.size(), 8, pull);
  rows.assign(rows.size(), 0.5f);
  PushBatch push;
  push.values = reinterpret_cast<const char*>(rows.data());
  table.Push(keys.data(), keys.size(), 8, push);
  table.Shrink(1, 1, true);
  Selection all;
  table.Begin(&all);
  Table copy(OptionsOf(data[0]));
  for (;;) {
    const std::vector<char> next = table.Next();
    if (next.empty()) break;
    copy.Absorb(next.data(), next.size(), nullptr);
  }
  table.End();
  return 0;
}

#ifdef HETERPS_REPLAY
// Without libFuzzer: the inputs are files.
int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    std::ifstream file(names[i], std::ios::binary);
    const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  }
}
#endif
