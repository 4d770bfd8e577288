// ps._native: what a client does to a batch of keys and rows.
#include "batch/batch.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "batch/plan.h"
#include "bindings/platform.h"
#include "bindings/python.h"
#include "table/block.h"
#include "table/hash.h"
#include "table/table.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

nb::tuple UniqueKeys(nb::handle keys_object) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  Unique unique;
  {
    nb::gil_scoped_release released;
    FindUnique(keys.data(), n, &unique);
  }
  return nb::make_tuple(ToArray(std::move(unique.keys), unique.count),
                        ToArray(std::move(unique.inverse), n));
}

// `route[bucket]` is the shard that holds the bucket.
const uint16_t* CheckedRoute(const View& route, uint32_t shards) {
  route.Expect(kBuckets * sizeof(uint16_t), "route");
  const auto* to = reinterpret_cast<const uint16_t*>(route.data());
  for (size_t b = 0; b < kBuckets; ++b) {
    if (to[b] >= shards)
      throw std::invalid_argument("route: a bucket of a shard that is not there");
  }
  return to;
}

nb::list PartitionKeys(nb::handle keys_object, nb::handle route_object, uint32_t shards) {
  View keys(keys_object), route(route_object);
  const size_t n = keys.Count(8, "keys");
  const uint16_t* to = CheckedRoute(route, shards);
  std::vector<Part> parts;
  {
    nb::gil_scoped_release released;
    parts = Partition(keys.data(), n, to, shards);
  }
  nb::list out;
  for (Part& part : parts) {
    out.append(nb::make_tuple(ToArray(std::move(part.keys)), ToArray(std::move(part.positions))));
  }
  return out;
}

// Distinct keys by shard, where each shard's begin, and the end; and the inverse.
nb::tuple PlanKeys(nb::handle keys_object, nb::handle route_object, uint32_t shards) {
  View keys(keys_object), route(route_object);
  const size_t n = keys.Count(8, "keys");
  const uint16_t* to = CheckedRoute(route, shards);
  Plan plan;
  {
    nb::gil_scoped_release released;
    MakePlan(keys.data(), n, to, shards, &plan);
  }
  nb::list begin;
  for (const size_t at : plan.begin) begin.append(at);
  return nb::make_tuple(ToArray(std::move(plan.keys), plan.count), begin,
                        ToArray(std::move(plan.inverse), n));
}

void CheckIndices(const int64_t* values, size_t n, size_t below, const char* what) {
  uint64_t highest = 0;  // a negative index is a huge unsigned one
  for (size_t i = 0; i < n; ++i) highest = std::max(highest, static_cast<uint64_t>(values[i]));
  if (n > 0 && highest >= below) {
    throw std::invalid_argument(std::string(what) + ": an index is not below " +
                                std::to_string(below));
  }
}

const int64_t* Indices(const View& view) { return reinterpret_cast<const int64_t*>(view.data()); }

// Assembles replies of the shards. Row j of parts[s] is distinct row positions[j], or without
// positions the next one; distinct row inverse[i] goes to row i of the result.
Floats GatherRows(nb::list parts, size_t distinct, nb::object inverse_object, size_t dim,
                  const std::string& dtype) {
  const Dtype as = DtypeOf(dtype);
  const size_t bytes = dim * SizeOf(as);
  std::vector<View> views;  // hold the buffers
  views.reserve(2 * nb::len(parts));
  std::vector<RowPart> rows;
  size_t filled = 0;
  bool placed = false;
  for (nb::handle part : parts) {
    auto pair = nb::cast<nb::tuple>(part);
    const View& data = views.emplace_back(View(pair[0]));
    RowPart row{data.data(), data.Count(bytes, "rows"), nullptr};
    if (!pair[1].is_none()) {
      const View& positions = views.emplace_back(View(pair[1]));
      row.count = positions.Count(8, "positions");
      row.positions = Indices(positions);
      placed = true;
    }
    data.Expect(row.count * bytes, "rows");
    filled += row.count;
    rows.push_back(row);
  }
  if (filled != distinct) throw std::invalid_argument("the parts do not cover the rows");
  std::optional<View> inverse;
  if (!inverse_object.is_none()) inverse.emplace(inverse_object);
  const size_t n = inverse ? inverse->Count(8, "inverse") : distinct;
  Floats out = NewFloats(n, dim);
  nb::gil_scoped_release released;
  if (placed) {
    std::vector<bool> seen(distinct);
    size_t next = 0;
    for (const RowPart& part : rows) {
      if (part.positions) CheckIndices(part.positions, part.count, distinct, "positions");
      for (size_t j = 0; j < part.count; ++j) {
        const size_t at = part.positions ? static_cast<size_t>(part.positions[j]) : next++;
        if (seen[at]) throw std::invalid_argument("the parts do not cover the rows");
        seen[at] = true;
      }
    }
  }
  if (inverse) CheckIndices(Indices(*inverse), n, distinct, "inverse");
  CopyRows(rows, distinct, inverse ? Indices(*inverse) : nullptr, n, dim, as, out.data());
  return out;
}

Floats SumSegments(nb::handle inverse_object, nb::handle grads_object, size_t segments,
                   size_t dim) {
  View inverse(inverse_object), grads(grads_object);
  const size_t n = inverse.Count(8, "inverse");
  grads.Expect(n * dim * sizeof(float), "gradients");
  Floats out = NewFloats(segments, dim);
  nb::gil_scoped_release released;
  CheckIndices(Indices(inverse), n, segments, "inverse");
  SegmentSum(Indices(inverse), grads.data(), n, segments, dim, out.data());
  return out;
}

// Keys, then the rows of `values` at `positions`, then their shows and clicks where given.
void FillPush(const View& keys, const View& values, const View& positions, size_t dim, Dtype as,
              size_t key_bytes, const View* usage, char* body) {
  constexpr size_t kAhead = 8;
  const size_t n = keys.Count(8, "keys");
  const size_t rows = values.Count(dim * sizeof(float), "gradients");
  const int64_t* at = Indices(positions);
  CheckIndices(at, n, rows, "positions");
  CopyKeys(keys.data(), n, key_bytes, body);
  body += n * key_bytes;
  const size_t bytes = dim * SizeOf(as);
  const auto row_of = [&](size_t i) {
    return values.data() + static_cast<size_t>(at[i]) * dim * sizeof(float);
  };
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(row_of(i + kAhead));
    const char* row = row_of(i);
    if (as == Dtype::kFloat32) {
      CopyRow(body + i * bytes, row, bytes);
    } else {
      Encode(as, row, dim, body + i * bytes);
    }
  }
  if (!usage) return;
  body += n * bytes;
  for (size_t column = 0; column < 2; ++column) {
    const char* from = usage->data() + column * rows * sizeof(float);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(body + (column * n + i) * sizeof(float),
                  from + static_cast<size_t>(at[i]) * sizeof(float), sizeof(float));
    }
  }
}

struct PushParts {
  View keys, values, positions;
  std::optional<View> usage;
  Dtype as;
  size_t size;

  PushParts(nb::handle keys_object, nb::handle values_object, nb::handle positions_object,
            size_t dim, const std::string& dtype, size_t key_bytes, nb::object usage_object)
      : keys(keys_object), values(values_object), positions(positions_object), as(DtypeOf(dtype)) {
    const size_t n = keys.Count(8, "keys");
    positions.Expect(8 * n, "positions");
    size = n * (CheckKeyBytes(key_bytes) + dim * SizeOf(as));
    if (usage_object.is_none()) return;
    usage.emplace(usage_object);
    usage->Expect(2 * values.Count(dim * sizeof(float), "gradients") * sizeof(float), "usage");
    size += 2 * n * sizeof(float);
  }
  void Fill(size_t dim, size_t key_bytes, char* body) const {
    nb::gil_scoped_release released;
    FillPush(keys, values, positions, dim, as, key_bytes, usage ? &*usage : nullptr, body);
  }
};

nb::bytes PushMessage(nb::handle prefix_object, nb::handle keys, nb::handle values,
                      nb::handle positions, size_t dim, const std::string& dtype, size_t key_bytes,
                      nb::object usage) {
  View prefix(prefix_object);
  const PushParts parts(keys, values, positions, dim, dtype, key_bytes, usage);
  char* body;
  nb::bytes out = NewMessage(prefix, parts.size, &body);
  parts.Fill(dim, key_bytes, body);
  return out;
}

void PushInto(nb::handle out_object, nb::handle keys, nb::handle values, nb::handle positions,
              size_t dim, const std::string& dtype, size_t key_bytes, nb::object usage) {
  View out(out_object, true);
  const PushParts parts(keys, values, positions, dim, dtype, key_bytes, usage);
  out.Expect(parts.size, "room for a push");
  parts.Fill(dim, key_bytes, out.writable());
}

nb::bytes NarrowKeys(nb::handle keys_object) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  char* body;
  nb::bytes empty("", 0);
  nb::bytes out = NewMessage(View(empty), 4 * n, &body);
  nb::gil_scoped_release released;
  CopyKeys(keys.data(), n, 4, body);
  return out;
}

void CheckFiniteGradients(nb::handle keys_object, size_t key_bytes, nb::handle grads_object,
                          size_t dim) {
  View keys(keys_object), grads(grads_object);
  const size_t n = keys.Count(CheckKeyBytes(key_bytes), "keys");
  grads.Expect(n * dim * sizeof(float), "gradients");
  nb::gil_scoped_release released;
  CheckFinite(keys.data(), key_bytes, grads.data(), n, dim);
}

// float32 of values that came as something shorter.
nb::object DecodeValues(nb::handle values_object, const std::string& dtype) {
  View values(values_object);
  const Dtype as = DtypeOf(dtype);
  const size_t n = values.Count(SizeOf(as), "values");
  std::vector<float> out(n);
  {
    nb::gil_scoped_release released;
    Decode(as, values.data(), n, out.data());
  }
  return ToArray(std::move(out));
}

// Keys and rows of a block of values.
nb::tuple DecodeBlock(nb::handle block_object, size_t dim) {
  View block(block_object);
  BlockHeader header;
  if (block.size() < sizeof(header)) throw std::invalid_argument("a block of rows ends early");
  std::memcpy(&header, block.data(), sizeof(header));
  const auto kind = static_cast<BlockKind>(header.kind);
  const bool gone = kind == BlockKind::kGone;
  const size_t expected = 8 + (gone ? 0 : dim * sizeof(float));
  if (std::memcmp(header.magic, kBlockMagic, 4) != 0 || (kind != BlockKind::kValues && !gone) ||
      header.record_bytes != expected ||
      block.size() - sizeof(header) != uint64_t{header.count} * expected) {
    throw std::invalid_argument("not a block of values of that dim");
  }
  std::vector<uint64_t> keys(header.count);
  Floats rows = NewFloats(gone ? 0 : header.count, dim);
  const char* record = block.data() + sizeof(header);
  for (size_t i = 0; i < header.count; ++i, record += expected) {
    std::memcpy(&keys[i], record, 8);
    if (!gone) std::memcpy(rows.data() + i * dim, record + 8, dim * sizeof(float));
  }
  return nb::make_tuple(gone, ToArray(std::move(keys)), rows);
}

nb::object BucketsOfKeys(nb::handle keys_object) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  std::vector<uint16_t> out(n);
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<uint16_t>(BucketOf(Mix(LoadKey(keys.data(), i))));
  }
  return ToArray(std::move(out));
}

}  // namespace

void BindBatch(nb::module_& m) {
  m.def("unique", &UniqueKeys, "keys"_a);
  m.def("partition", &PartitionKeys, "keys"_a, "route"_a, "shards"_a);
  m.def("plan", &PlanKeys, "keys"_a, "route"_a, "shards"_a);
  m.def("gather", &GatherRows, "parts"_a, "distinct"_a, "inverse"_a.none(), "dim"_a, "dtype"_a);
  m.def("segment_sum", &SumSegments, "inverse"_a, "grads"_a, "segments"_a, "dim"_a);
  m.def("push_message", &PushMessage, "prefix"_a, "keys"_a, "values"_a, "positions"_a, "dim"_a,
        "dtype"_a, "key_bytes"_a, "usage"_a.none());
  m.def("push_into", &PushInto, "out"_a, "keys"_a, "values"_a, "positions"_a, "dim"_a, "dtype"_a,
        "key_bytes"_a, "usage"_a.none());
  m.def("narrow_keys", &NarrowKeys, "keys"_a);
  m.def("check_finite", &CheckFiniteGradients, "keys"_a, "key_bytes"_a, "grads"_a, "dim"_a);
  m.def("decode_values", &DecodeValues, "values"_a, "dtype"_a);
  m.def("decode_block", &DecodeBlock, "block"_a, "dim"_a);
  m.def("buckets_of", &BucketsOfKeys, "keys"_a);
}

}  // namespace heterps::ps
