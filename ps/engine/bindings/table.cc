// ps._native.Table and Snapshot.
#include "table/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstring>
#include <optional>

#include "bindings/python.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

template <typename T>
T Get(const nb::dict& fields, const char* name) {
  return nb::cast<T>(fields[name]);
}

Optimizer OptimizerOf(const nb::dict& d) {
  Optimizer o;
  o.kind = Lookup<Optimizer::Kind>(Get<std::string>(d, "kind"),
                                   {{"sgd", Optimizer::Kind::kSgd},
                                    {"momentum", Optimizer::Kind::kMomentum},
                                    {"adagrad", Optimizer::Kind::kAdagrad},
                                    {"rowwise_adagrad", Optimizer::Kind::kRowwiseAdagrad},
                                    {"adam", Optimizer::Kind::kAdam},
                                    {"adamw", Optimizer::Kind::kAdamW},
                                    {"ftrl", Optimizer::Kind::kFtrl}},
                                   "optimizer");
  o.learning_rate = static_cast<float>(Get<double>(d, "learning_rate"));
  o.epsilon = static_cast<float>(Get<double>(d, "epsilon"));
  o.beta1 = Get<double>(d, "beta1");
  o.beta2 = Get<double>(d, "beta2");
  o.weight_decay = static_cast<float>(Get<double>(d, "weight_decay"));
  o.initial_accumulator = static_cast<float>(Get<double>(d, "initial_accumulator"));
  o.momentum = static_cast<float>(Get<double>(d, "momentum"));
  o.l1 = static_cast<float>(Get<double>(d, "l1"));
  o.l2 = static_cast<float>(Get<double>(d, "l2"));
  o.beta = static_cast<float>(Get<double>(d, "beta"));
  o.amsgrad = Get<bool>(d, "amsgrad");
  o.clip_norm = static_cast<float>(Get<double>(d, "clip_norm"));
  o.bound = static_cast<float>(Get<double>(d, "bound"));
  o.trust_ratio = Get<bool>(d, "trust_ratio");
  return o;
}

Initializer InitializerOf(const nb::dict& d) {
  Initializer out;
  out.kind = Lookup<Initializer::Kind>(Get<std::string>(d, "kind"),
                                       {{"zeros", Initializer::Kind::kZeros},
                                        {"uniform", Initializer::Kind::kUniform},
                                        {"normal", Initializer::Kind::kNormal}},
                                       "initializer");
  out.scale = Get<double>(d, "scale");
  out.seed = Get<uint64_t>(d, "seed");
  return out;
}

// Field names are those of protos/parameter_server.proto.
void InitTable(Table* self, nb::list segment_list, const std::string& dtype, bool stochastic,
               nb::dict admission, nb::dict score, nb::dict eviction, uint64_t memory_bytes,
               const std::string& directory) {
  std::vector<Segment> segments;
  for (nb::handle item : segment_list) {
    auto fields = nb::cast<nb::dict>(item);
    Segment segment;
    segment.dim = Get<size_t>(fields, "dim");
    segment.optimizer = OptimizerOf(Get<nb::dict>(fields, "optimizer"));
    segment.initializer = InitializerOf(Get<nb::dict>(fields, "initializer"));
    segment.lazy = Get<double>(fields, "lazy");
    segments.push_back(std::move(segment));
  }
  Options options{Layout(std::move(segments), DtypeOf(dtype), stochastic), {}, {}, {}, 0, {}};
  using Kind = Admission::Kind;
  options.admission.kind = Lookup<Kind>(Get<std::string>(admission, "kind"),
                                        {{"", Kind::kAll},
                                         {"count", Kind::kCount},
                                         {"bloom", Kind::kBloom},
                                         {"probability", Kind::kProbability},
                                         {"score", Kind::kScore}},
                                        "admission");
  options.admission.threshold = Get<double>(admission, "threshold");
  options.admission.capacity = Get<uint64_t>(admission, "capacity");
  options.admission.false_positive = Get<double>(admission, "false_positive");
  options.admission.reads_zeros = Get<std::string>(admission, "reads") == "zeros";
  options.score.non_click = static_cast<float>(Get<double>(score, "non_click"));
  options.score.click = static_cast<float>(Get<double>(score, "click"));
  options.score.decay = static_cast<float>(Get<double>(score, "decay"));
  options.eviction.ttl_s = Get<uint64_t>(eviction, "ttl_s");
  options.eviction.ttl_steps = Get<uint64_t>(eviction, "ttl_steps");
  options.eviction.min_norm = Get<double>(eviction, "min_norm");
  options.eviction.min_score = Get<double>(eviction, "min_score");
  options.eviction.max_rows = Get<uint64_t>(eviction, "max_rows");
  options.eviction.by_count = Get<std::string>(eviction, "order") != "lru";
  options.memory_bytes = memory_bytes;
  options.directory = directory;
  new (self) Table(std::move(options));
}

Floats TablePull(Table& self, nb::handle keys_object, bool read_only) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  Floats out = NewFloats(n, self.dim());
  nb::gil_scoped_release released;
  self.Pull(keys.data(), n, 8,
            {read_only, true, Dtype::kFloat32, reinterpret_cast<char*>(out.data())});
  return out;
}

nb::bytes TablePullMessage(Table& self, nb::handle prefix_object, nb::handle keys_object,
                           size_t key_bytes, bool read_only, const std::string& dtype) {
  View prefix(prefix_object), keys(keys_object);
  const size_t n = keys.Count(CheckKeyBytes(key_bytes), "keys");
  const Dtype as = DtypeOf(dtype);
  char* body;
  nb::bytes out = NewMessage(prefix, n * self.dim() * SizeOf(as), &body);
  nb::gil_scoped_release released;
  self.Pull(keys.data(), n, key_bytes, {read_only, true, as, body});
  return out;
}

size_t TablePullInto(Table& self, nb::handle keys_object, size_t key_bytes, bool read_only,
                     const std::string& dtype, nb::handle out_object, nb::object route_object,
                     uint16_t shard) {
  View keys(keys_object), out(out_object, true);
  const size_t n = keys.Count(CheckKeyBytes(key_bytes), "keys");
  const Dtype as = DtypeOf(dtype);
  out.Expect(n * self.dim() * SizeOf(as), "room for rows");
  std::array<uint16_t, kBuckets> route;  // a copy: the sender may still write to its own
  Mine mine;
  if (!route_object.is_none()) {
    View given(route_object);
    given.Expect(sizeof(route), "route");
    std::memcpy(route.data(), given.data(), sizeof(route));
    mine = {route.data(), shard};
  }
  nb::gil_scoped_release released;
  return self.Pull(keys.data(), n, key_bytes, {read_only, true, as, out.writable(), mine});
}

void TablePrefetch(Table& self, nb::handle keys_object, size_t key_bytes) {
  View keys(keys_object);
  const size_t n = keys.Count(CheckKeyBytes(key_bytes), "keys");
  nb::gil_scoped_release released;
  self.Pull(keys.data(), n, key_bytes, {false, false, Dtype::kFloat32, nullptr});
}

Buckets BucketsOf(const View& flags) {
  flags.Expect(kBuckets, "buckets");
  Buckets out;
  for (size_t b = 0; b < kBuckets; ++b) out[b] = flags.data()[b] != 0;
  return out;
}

void TablePush(Table& self, nb::handle keys_object, size_t key_bytes, nb::handle values_object,
               const std::string& kind, double rate, uint64_t nonce, uint32_t time_s, uint32_t step,
               nb::object usage_object, bool distinct, uint64_t turn, nb::object shrink_object) {
  View keys(keys_object), values(values_object);
  const size_t n = keys.Count(CheckKeyBytes(key_bytes), "keys");
  values.Expect(n * self.dim() * sizeof(float), "gradients");
  std::optional<View> usage;
  PushBatch batch;
  if (!usage_object.is_none()) {
    usage.emplace(usage_object);
    usage->Expect(2 * n * sizeof(float), "usage");
    batch.shows = usage->data();
    batch.clicks = usage->data() + n * sizeof(float);
  }
  using Kind = PushBatch::Kind;
  batch.kind = Lookup<Kind>(
      kind, {{"", Kind::kGradient}, {"add", Kind::kAdd}, {"assign", Kind::kAssign}}, "push");
  batch.values = values.data();
  batch.rate = static_cast<float>(rate);
  batch.nonce = nonce;
  batch.time_s = time_s;
  batch.step = step;
  batch.distinct = distinct;
  batch.turn = turn;
  std::optional<Buckets> shrink;
  if (!shrink_object.is_none()) batch.shrink = &shrink.emplace(BucketsOf(View(shrink_object)));
  nb::gil_scoped_release released;
  self.Push(keys.data(), n, key_bytes, batch);
}

uint64_t TableAbsorb(Table& self, nb::handle block_object, nb::object wanted_object,
                     const Table* source) {
  View block(block_object);
  std::optional<Buckets> wanted;
  if (!wanted_object.is_none()) wanted = BucketsOf(View(wanted_object));
  if (source && source->dim() != self.dim()) {
    throw std::invalid_argument("rows of dim " + std::to_string(source->dim()) + "; expected " +
                                std::to_string(self.dim()));
  }
  nb::gil_scoped_release released;
  return self.Absorb(block.data(), block.size(), wanted ? &*wanted : nullptr,
                     source ? &source->options() : nullptr);
}

// Keeps its table from being saved twice at a time; ends with close or with its life.
class Snapshot {
 public:
  Snapshot(Table& table, Selection selection) : table_(&table), selection_(selection) {
    cut_ = table.Begin(&selection_);
  }
  ~Snapshot() { Close(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  uint32_t cut() const { return cut_; }
  nb::object Next() {
    if (!table_) return nb::none();
    std::vector<char> block;
    {
      nb::gil_scoped_release released;
      block = table_->Next();
    }
    if (block.empty()) {
      Close();
      return nb::none();
    }
    return nb::bytes(block.data(), block.size());
  }
  void Close() {
    if (table_) std::exchange(table_, nullptr)->End();
  }

 private:
  Table* table_;
  Selection selection_;
  uint32_t cut_ = 0;
};

Snapshot* NewSnapshot(Table& self, uint32_t since, bool values, double min_score,
                      nb::object buckets) {
  Selection selection;
  selection.since = since;
  selection.values = values;
  selection.min_score = min_score;
  if (!buckets.is_none()) {
    selection.all_buckets = false;
    selection.buckets = BucketsOf(View(buckets));
  }
  nb::gil_scoped_release released;
  return new Snapshot(self, selection);
}

nb::dict TableCounters(const Table& self) {
  Counters c;
  {
    nb::gil_scoped_release released;
    c = self.counters();
  }
  nb::dict out;
  out["rows"] = c.rows, out["waiting"] = c.waiting, out["disk_rows"] = c.disk_rows;
  out["bytes"] = c.bytes, out["missed"] = c.missed, out["evicted"] = c.evicted;
  out["promoted"] = c.promoted, out["demoted"] = c.demoted;
  out["tidied"] = c.tidied;
  out["disk_bytes"] = self.disk_bytes(), out["pulled"] = self.pulled();
  out["pushed"] = self.pushed();
  return out;
}

}  // namespace

void BindTable(nb::module_& m) {
  nb::exception<Forgotten>(m, "ForgottenError", PyExc_ValueError);
  nb::exception<DiskFull>(m, "DiskFullError", PyExc_RuntimeError);
  nb::exception<Broken>(m, "BrokenError", PyExc_RuntimeError);
  nb::class_<Snapshot>(m, "Snapshot")
      .def_prop_ro("cut", &Snapshot::cut)
      .def("next", &Snapshot::Next)
      .def("close", &Snapshot::Close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Table>(m, "Table")
      .def("__init__", &InitTable, "segments"_a, "dtype"_a, "stochastic"_a, "admission"_a,
           "score"_a, "eviction"_a, "memory_bytes"_a, "directory"_a)
      .def("pull", &TablePull, "keys"_a, "read_only"_a)
      .def("pull_message", &TablePullMessage, "prefix"_a, "keys"_a, "key_bytes"_a, "read_only"_a,
           "dtype"_a)
      .def("pull_into", &TablePullInto, "keys"_a, "key_bytes"_a, "read_only"_a, "dtype"_a, "out"_a,
           "route"_a.none() = nb::none(), "shard"_a = 0)
      .def("prefetch", &TablePrefetch, "keys"_a, "key_bytes"_a)
      .def("push", &TablePush, "keys"_a, "key_bytes"_a, "values"_a, "kind"_a, "rate"_a, "nonce"_a,
           "time_s"_a, "step"_a, "usage"_a.none(), "distinct"_a = false, "turn"_a = 0,
           "shrink"_a.none() = nb::none())
      .def("take_turn", &Table::TakeTurn)
      .def("check_room", &Table::CheckRoom, nb::call_guard<nb::gil_scoped_release>())
      .def("snapshot", &NewSnapshot, "since"_a, "values"_a, "min_score"_a, "buckets"_a.none(),
           nb::keep_alive<0, 1>())
      .def("absorb", &TableAbsorb, "block"_a, "wanted"_a.none(), "source"_a.none() = nb::none())
      .def(
          "erase",
          [](Table& self, nb::handle buckets_object) {
            const Buckets buckets = BucketsOf(View(buckets_object));
            nb::gil_scoped_release released;
            self.Erase(buckets);
          },
          "buckets"_a)
      .def("shrink", &Table::Shrink, "time_s"_a, "step"_a, "decay"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("demote", &Table::Demote, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "keys",
          [](const Table& self, size_t limit) {
            std::vector<uint64_t> keys;
            {
              nb::gil_scoped_release released;
              keys = self.Keys(limit);
            }
            return ToArray(std::move(keys));
          },
          "limit"_a)
      .def("counters", &TableCounters)
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("row_bytes", [](const Table& self) { return self.options().layout.bytes(true); })
      .def_prop_ro("tracks_usage", [](const Table& self) { return self.options().usage(); });
}

}  // namespace heterps::ps
