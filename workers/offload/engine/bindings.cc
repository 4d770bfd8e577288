// workers.offload.engine._reads. The lock of the interpreter is released around all that waits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "checksum.h"
#include "reads.h"

namespace nb = nanobind;

namespace heterps::offload {
namespace {

using namespace nb::literals;

// Writable buffers of Python, held until no thread needs them any more.
class Buffers {
 public:
  ~Buffers() {
    if (!Py_IsInitialized()) return;  // the process ends, and its memory with it
    nb::gil_scoped_acquire held;
    for (Py_buffer& one : views_) PyBuffer_Release(&one);
  }
  Py_buffer& Add(nb::handle object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
      nb::raise_python_error();
    }
    views_.push_back(view);
    return views_.back();
  }

 private:
  std::vector<Py_buffer> views_;
};

// A function of Python, called by any thread.
class Function {
 public:
  explicit Function(nb::object function) : function_(std::move(function)) {}
  ~Function() {
    if (!Py_IsInitialized()) {
      (void)function_.release();
      return;
    }
    nb::gil_scoped_acquire held;
    function_.reset();
  }
  void operator()(size_t extent, uint64_t from) const {
    nb::gil_scoped_acquire held;
    function_(extent, from);
  }

 private:
  nb::object function_;
};

TransferPtr MakeTransfer(int file, bool direct, bool writes, uint64_t at, nb::list memory,
                         const std::vector<std::optional<uint32_t>>& expected, nb::object before) {
  auto buffers = std::make_shared<Buffers>();
  std::vector<Extent> extents;
  for (size_t i = 0; i < nb::len(memory); ++i) {
    const Py_buffer& view = buffers->Add(memory[i]);
    const auto size = static_cast<uint64_t>(view.len);
    extents.push_back({at, static_cast<char*>(view.buf), size, expected.at(i)});
    at += size;
  }
  std::function<void(size_t, uint64_t)> called;
  if (!before.is_none()) {
    auto function = std::make_shared<Function>(std::move(before));
    called = [function](size_t extent, uint64_t from) { (*function)(extent, from); };
  }
  return std::make_shared<Transfer>(file, direct, writes, std::move(extents), std::move(buffers),
                                    std::move(called));
}

// Whether no signal has come whose handler raises; what it raised is set then.
bool Uninterrupted() {
  nb::gil_scoped_acquire held;
  return PyErr_CheckSignals() == 0;
}

void OrRaise(bool whole) {
  if (whole) return;
  nb::gil_scoped_acquire held;
  nb::raise_python_error();
}

// A fork of the process has none of the threads, and does not wait for them. Who interrupts this
// leaves behind those that hang.
struct Forgotten {
  pid_t process = ::getpid();
  void operator()(Readers* readers) const {
    if (::getpid() != process) return;
    const nb::error_scope kept;
    bool ended;
    {
      nb::gil_scoped_release released;
      ended = readers->Close(Uninterrupted);
      if (ended) delete readers;
    }
    if (!ended) PyErr_WriteUnraisable(nullptr);
  }
};

struct Owner {
  Owner(size_t threads, bool ahead) : readers(new Readers(threads, ahead)) {}
  std::unique_ptr<Readers, Forgotten> readers;
};

uint32_t ChecksumOf(nb::handle object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
  uint32_t sum;
  {
    nb::gil_scoped_release released;
    sum = Checksum(static_cast<const char*>(view.buf), static_cast<size_t>(view.len));
  }
  PyBuffer_Release(&view);
  return sum;
}

}  // namespace

NB_MODULE(_reads, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.doc() = "Threads that read and write parts of a file (see workers/offload/slots/readers.py)";
  m.def("checksum", &ChecksumOf, "data"_a);
  nb::enum_<Transfer::Kind>(m, "Kind")
      .value("FINE", Transfer::Kind::kFine)
      .value("ERRNO", Transfer::Kind::kErrno)
      .value("SHORT", Transfer::Kind::kShort)
      .value("DAMAGED", Transfer::Kind::kDamaged)
      .value("DROPPED", Transfer::Kind::kDropped)
      .value("THROWN", Transfer::Kind::kThrown);
  nb::class_<Transfer>(m, "Transfer")
      .def(nb::new_(&MakeTransfer), "file"_a, "direct"_a, "writes"_a, "at"_a, "memory"_a,
           "expected"_a, "before"_a.none())
      .def_prop_ro("done", &Transfer::done)
      .def_prop_ro("outcome", [](const Transfer& self) {
        const Transfer::Outcome& one = self.outcome();
        return nb::make_tuple(one.kind, one.error, one.extent, one.found);
      });
  const nb::call_guard<nb::gil_scoped_release> released;
  nb::class_<Owner>(m, "Readers")
      .def(nb::init<size_t, bool>(), "threads"_a, "ahead"_a)
      .def(
          "begin",
          [](Owner& self, const TransferPtr& transfer, uint64_t part, const TransferPtr& then) {
            self.readers->Begin(transfer, part, then);
          },
          "transfer"_a, "part"_a, "then"_a.none(), released)
      .def(
          "begin_ahead",
          [](Owner& self, const TransferPtr& transfer, uint64_t part) {
            self.readers->BeginAhead(transfer, part);
          },
          "transfer"_a, "part"_a, released)
      .def(
          "hurry", [](Owner& self, const TransferPtr& transfer) { self.readers->Hurry(transfer); },
          "transfer"_a, released)
      .def(
          "drop",
          [](Owner& self, const TransferPtr& transfer) { return self.readers->Drop(transfer); },
          "transfer"_a, released)
      .def(
          "wait",
          [](Owner& self, const std::vector<TransferPtr>& transfers) {
            OrRaise(self.readers->Wait(transfers, Uninterrupted));
          },
          "transfers"_a, released)
      .def(
          "close", [](Owner& self) { OrRaise(self.readers->Close(Uninterrupted)); }, released)
      .def_prop_ro("busy", [](const Owner& self) { return self.readers->busy(); })
      .def_prop_ro("waited", [](const Owner& self) { return self.readers->waited(); })
      .def_prop_ro("flying", [](const Owner& self) { return self.readers->flying(); });
}

}  // namespace heterps::offload
