// ps._native. Inputs are any C-contiguous buffers, used in place; the lock of the interpreter is
// released around all work. The Python layer has validated shapes; sizes are checked again here.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings/python.h"
#include "table/hash.h"
#include "table/window.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

nb::list WindowExport(const Window& self) {
  nb::list out;
  for (const Window::Client& c : self.Export()) {
    out.append(
        nb::make_tuple(nb::str(c.name.data(), c.name.size()), c.epoch, c.highest,
                       nb::bytes(reinterpret_cast<const char*>(c.bits.data()), sizeof(c.bits))));
  }
  return out;
}

std::vector<Window::Client> Clients(nb::list clients) {
  std::vector<Window::Client> out;
  for (nb::handle item : clients) {
    auto fields = nb::cast<nb::tuple>(item);
    Window::Client c;
    c.name = nb::cast<std::string>(fields[0]);
    c.epoch = nb::cast<uint64_t>(fields[1]);
    c.highest = nb::cast<uint64_t>(fields[2]);
    View bits(fields[3]);
    bits.Expect(sizeof(c.bits), "window bits");
    std::memcpy(c.bits.data(), bits.data(), sizeof(c.bits));
    out.push_back(std::move(c));
  }
  return out;
}

}  // namespace

void BindWindow(nb::module_& m) {
  nb::class_<Window>(m, "Window")
      .def(nb::init<>())
      .def(
          "mark",
          [](Window& self, std::string_view client, uint64_t epoch, uint64_t sequence) {
            return static_cast<int>(self.Mark(client, epoch, sequence));
          },
          "client"_a, "epoch"_a, "sequence"_a)
      .def("unmark", &Window::Unmark, "client"_a, "epoch"_a, "sequence"_a)
      .def("__len__", &Window::size)
      .def("export", &WindowExport)
      .def(
          "merge", [](Window& self, nb::list clients) { self.Merge(Clients(clients)); },
          "clients"_a);
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.attr("BUCKETS") = kBuckets;
  m.attr("WINDOW") = Window::kWidth;
  BindWindow(m);
  BindTable(m);
  BindBags(m);
  BindBatch(m);
  BindMerge(m);
  BindPieces(m);
}

}  // namespace heterps::ps
