// ps._native. Inputs are any C-contiguous buffers, used in place; the lock of the interpreter is
// released around all work. The Python layer has validated shapes; sizes are checked again here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batch.h"
#include "hash.h"
#include "table.h"
#include "window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace heterps::ps {
namespace {

// A held view of a Python buffer.
class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
  }
  View(View&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  ~View() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  const char* data() const { return static_cast<const char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  // Number of `item`-byte items.
  size_t Count(size_t item, const char* what) const {
    if (item == 0 || size() % item != 0) {
      throw std::invalid_argument(std::string(what) + ": " + std::to_string(size()) +
                                  " bytes are not a whole number of " + std::to_string(item) +
                                  "-byte items");
    }
    return size() / item;
  }
  void Expect(size_t bytes, const char* what) const {
    if (size() == bytes) return;
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(size()) +
                                " bytes, expected " + std::to_string(bytes));
  }

 private:
  Py_buffer view_{};
};

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

Floats NewFloats(size_t n, size_t dim, bool zero = false) {
  float* data = zero ? new float[n * dim]() : new float[n * dim];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Floats(data, {n, dim}, owner);
}

template <typename T>
nb::object ToArray(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// bytes of `size` bytes beginning with `prefix`; the caller fills the rest through *body.
nb::bytes NewMessage(const View& prefix, size_t body_size, char** body) {
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, prefix.size() + body_size);
  if (!bytes) nb::raise_python_error();
  char* data = PyBytes_AS_STRING(bytes);
  std::memcpy(data, prefix.data(), prefix.size());
  *body = data + prefix.size();
  return nb::steal<nb::bytes>(bytes);
}

template <typename Enum>
Enum Lookup(const std::string& name, std::initializer_list<std::pair<const char*, Enum>> known,
            const char* what) {
  for (const auto& [text, value] : known) {
    if (name == text) return value;
  }
  throw std::invalid_argument(std::string("unknown ") + what + " '" + name + "'");
}

void InitTable(Table* self, size_t dim, const std::string& optimizer, double learning_rate,
               double epsilon, double beta1, double beta2, double weight_decay,
               double initial_accumulator, const std::string& initializer, double scale,
               uint64_t seed) {
  Optimizer o;
  o.kind = Lookup<Optimizer::Kind>(optimizer,
                                   {{"sgd", Optimizer::Kind::kSgd},
                                    {"adagrad", Optimizer::Kind::kAdagrad},
                                    {"adam", Optimizer::Kind::kAdam}},
                                   "optimizer");
  o.learning_rate = static_cast<float>(learning_rate);
  o.epsilon = static_cast<float>(epsilon);
  o.beta1 = beta1;
  o.beta2 = beta2;
  o.weight_decay = static_cast<float>(weight_decay);
  o.initial_accumulator = static_cast<float>(initial_accumulator);
  Initializer init;
  init.kind = Lookup<Initializer::Kind>(initializer,
                                        {{"zeros", Initializer::Kind::kZeros},
                                         {"uniform", Initializer::Kind::kUniform},
                                         {"normal", Initializer::Kind::kNormal}},
                                        "initializer");
  init.scale = scale;
  init.seed = seed;
  if (dim == 0) throw std::invalid_argument("dim must be at least 1");
  new (self) Table(dim, std::move(o), init);
}

Floats TablePull(Table& self, nb::handle keys_object, bool read_only) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  Floats out = NewFloats(n, self.dim());
  nb::gil_scoped_release released;
  self.Pull(keys.data(), n, read_only, out.data());
  return out;
}

nb::bytes TablePullMessage(Table& self, nb::handle prefix_object, nb::handle keys_object,
                           bool read_only) {
  View prefix(prefix_object), keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  char* body;
  nb::bytes out = NewMessage(prefix, n * self.dim() * sizeof(float), &body);
  nb::gil_scoped_release released;
  self.Pull(keys.data(), n, read_only, body);
  return out;
}

void TablePush(Table& self, nb::handle keys_object, nb::handle grads_object) {
  View keys(keys_object), grads(grads_object);
  const size_t n = keys.Count(8, "keys");
  grads.Expect(n * self.dim() * sizeof(float), "gradients");
  nb::gil_scoped_release released;
  self.Push(keys.data(), grads.data(), n);
}

int TablePushOnce(Table& self, Window& window, std::string_view client, uint64_t epoch,
                  uint64_t sequence, nb::handle keys_object, nb::handle grads_object) {
  View keys(keys_object), grads(grads_object);
  const size_t n = keys.Count(8, "keys");
  grads.Expect(n * self.dim() * sizeof(float), "gradients");
  nb::gil_scoped_release released;
  return static_cast<int>(
      self.PushOnce(window, client, epoch, sequence, keys.data(), grads.data(), n));
}

nb::list WindowExport(const Window& self) {
  nb::list out;
  for (const Window::Client& c : self.Export()) {
    out.append(
        nb::make_tuple(nb::str(c.name.data(), c.name.size()), c.epoch, c.highest,
                       nb::bytes(reinterpret_cast<const char*>(c.bits.data()), sizeof(c.bits))));
  }
  return out;
}

void WindowRestore(Window& self, nb::list clients) {
  std::vector<Window::Client> restored;
  for (nb::handle item : clients) {
    auto fields = nb::cast<nb::tuple>(item);
    Window::Client c;
    c.name = nb::cast<std::string>(fields[0]);
    c.epoch = nb::cast<uint64_t>(fields[1]);
    c.highest = nb::cast<uint64_t>(fields[2]);
    View bits(fields[3]);
    bits.Expect(sizeof(c.bits), "window bits");
    std::memcpy(c.bits.data(), bits.data(), sizeof(c.bits));
    restored.push_back(std::move(c));
  }
  self.Restore(std::move(restored));
}

nb::tuple UniqueKeys(nb::handle keys_object) {
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  Unique unique;
  {
    nb::gil_scoped_release released;
    FindUnique(keys.data(), n, &unique);
  }
  return nb::make_tuple(ToArray(std::move(unique.keys)), ToArray(std::move(unique.inverse)));
}

nb::list PartitionKeys(nb::handle keys_object, uint32_t shards) {
  if (shards == 0 || shards > kBuckets) {
    throw std::invalid_argument("shards must be 1 to " + std::to_string(kBuckets));
  }
  View keys(keys_object);
  const size_t n = keys.Count(8, "keys");
  std::vector<Part> parts;
  {
    nb::gil_scoped_release released;
    parts = Partition(keys.data(), n, shards);
  }
  nb::list out;
  for (Part& part : parts) {
    out.append(nb::make_tuple(ToArray(std::move(part.keys)), ToArray(std::move(part.positions))));
  }
  return out;
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

// Assembles replies of the shards. Row j of parts[s] is distinct row positions[j]; distinct row
// inverse[i] goes to row i of the result.
Floats GatherRows(nb::list parts, size_t distinct, nb::object inverse_object, size_t dim) {
  std::vector<std::pair<View, View>> views;
  for (nb::handle part : parts) {
    auto pair = nb::cast<nb::tuple>(part);
    views.emplace_back(View(pair[0]), View(pair[1]));
  }
  std::optional<View> inverse;
  if (!inverse_object.is_none()) inverse.emplace(inverse_object);
  const size_t n = inverse ? inverse->Count(8, "inverse") : distinct;
  const size_t bytes = dim * sizeof(float);
  Floats out = NewFloats(n, dim);
  nb::gil_scoped_release released;
  std::vector<const void*> rows(distinct, nullptr);
  size_t filled = 0;
  for (const auto& [data, positions] : views) {
    const size_t count = positions.Count(8, "positions");
    data.Expect(count * bytes, "rows");
    CheckIndices(Indices(positions), count, distinct, "positions");
    for (size_t j = 0; j < count; ++j) rows[Indices(positions)[j]] = data.data() + j * bytes;
    filled += count;
  }
  if (filled != distinct) throw std::invalid_argument("the parts do not cover the rows");
  for (const void* row : rows) {
    if (!row) throw std::invalid_argument("the parts do not cover the rows");
  }
  if (inverse) CheckIndices(Indices(*inverse), n, distinct, "inverse");
  CopyRows(rows.data(), inverse ? Indices(*inverse) : nullptr, n, bytes, out.data());
  return out;
}

Floats SumSegments(nb::handle inverse_object, nb::handle grads_object, size_t segments,
                   size_t dim) {
  View inverse(inverse_object), grads(grads_object);
  const size_t n = inverse.Count(8, "inverse");
  grads.Expect(n * dim * sizeof(float), "gradients");
  Floats out = NewFloats(segments, dim, true);
  nb::gil_scoped_release released;
  CheckIndices(Indices(inverse), n, segments, "inverse");
  SegmentSum(Indices(inverse), grads.data(), n, dim, out.data());
  return out;
}

// prefix, keys, then the rows of `grads` at `positions`.
nb::bytes PushMessage(nb::handle prefix_object, nb::handle keys_object, nb::handle grads_object,
                      nb::handle positions_object, size_t dim) {
  View prefix(prefix_object), keys(keys_object), grads(grads_object), positions(positions_object);
  const size_t n = keys.Count(8, "keys");
  positions.Expect(8 * n, "positions");
  const size_t bytes = dim * sizeof(float);
  const size_t rows = grads.Count(bytes, "gradients");
  char* body;
  nb::bytes out = NewMessage(prefix, n * (8 + bytes), &body);
  nb::gil_scoped_release released;
  CheckIndices(Indices(positions), n, rows, "positions");
  std::memcpy(body, keys.data(), 8 * n);
  for (size_t i = 0; i < n; ++i) {
    std::memcpy(body + 8 * n + i * bytes,
                grads.data() + static_cast<size_t>(Indices(positions)[i]) * bytes, bytes);
  }
  return out;
}

void CheckFiniteGradients(nb::handle keys_object, nb::handle grads_object, size_t dim) {
  View keys(keys_object), grads(grads_object);
  const size_t n = keys.Count(8, "keys");
  grads.Expect(n * dim * sizeof(float), "gradients");
  nb::gil_scoped_release released;
  CheckFinite(keys.data(), grads.data(), n, dim);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.attr("BUCKETS") = kBuckets;
  m.attr("WINDOW") = Window::kWidth;

  nb::class_<Window>(m, "Window")
      .def(nb::init<>())
      .def("export", &WindowExport)
      .def("restore", &WindowRestore, "clients"_a);

  nb::class_<Table>(m, "Table")
      .def("__init__", &InitTable, "dim"_a, "optimizer"_a, "learning_rate"_a, "epsilon"_a,
           "beta1"_a, "beta2"_a, "weight_decay"_a, "initial_accumulator"_a, "initializer"_a,
           "scale"_a, "seed"_a)
      .def("pull", &TablePull, "keys"_a, "read_only"_a)
      .def("pull_message", &TablePullMessage, "prefix"_a, "keys"_a, "read_only"_a)
      .def("push", &TablePush, "keys"_a, "grads"_a)
      .def("push_once", &TablePushOnce, "window"_a, "client"_a, "epoch"_a, "sequence"_a, "keys"_a,
           "grads"_a)
      .def("pause", &Table::Pause, nb::call_guard<nb::gil_scoped_release>())
      .def("resume", &Table::Resume)
      .def(
          "save",
          [](Table& self, const std::string& path, nb::bytes spec) {
            std::string_view view(spec.c_str(), spec.size());
            nb::gil_scoped_release released;
            return self.Save(path, view);
          },
          "path"_a, "spec"_a)
      .def("load", &Table::Load, "path"_a, "shard"_a, "shards"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("keys", [](const Table& self) { return ToArray(self.Keys()); })
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("state_width", &Table::state_width)
      .def_prop_ro("rows", &Table::rows, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("nbytes", &Table::bytes, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("pulled", &Table::pulled)
      .def_prop_ro("pushed", &Table::pushed);

  m.def("unique", &UniqueKeys, "keys"_a);
  m.def("partition", &PartitionKeys, "keys"_a, "shards"_a);
  m.def("gather", &GatherRows, "parts"_a, "distinct"_a, "inverse"_a.none(), "dim"_a);
  m.def("segment_sum", &SumSegments, "inverse"_a, "grads"_a, "segments"_a, "dim"_a);
  m.def("push_message", &PushMessage, "prefix"_a, "keys"_a, "grads"_a, "positions"_a, "dim"_a);
  m.def("check_finite", &CheckFiniteGradients, "keys"_a, "grads"_a, "dim"_a);
}

}  // namespace heterps::ps
