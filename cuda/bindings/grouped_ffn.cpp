#include "heterps/grouped_ffn.h"

#include "arrays.h"
#include "ffn_shape.h"

namespace heterps {
namespace {

FfnShape shape_of(const Input& rows, const Input& w1, const Input& w2, int activation) {
  return ffn_shape_of(size_of(rows, "rows", 0, 2), size_of(rows, "rows", 1, 2), w1, w2, activation);
}

void check_inputs(const FfnShape& s, const Kind& kind, const Input& rows, const Input& offsets,
                  const Input& w1, const Input& w2) {
  check(rows, "rows", kind.rows, kind.device, {s.rows, s.dim});
  check(offsets, "offsets", nb::dtype<int64_t>(), kind.device, {s.groups + 1});
  check(w1, "w1", kind.rows, kind.device, {s.groups, s.dim, s.inner()});
  check(w2, "w2", kind.rows, kind.device, {s.groups, s.hidden, s.dim});
}

// The bytes of scratch that these inputs want on their device.
int64_t workspace_of(const Input& rows, const Input& w1, const Input& w2, int activation) {
  [[maybe_unused]] const FfnShape s = shape_of(rows, w1, w2, activation);
  [[maybe_unused]] const Kind kind = kind_of(rows);
#ifdef HETERPS_WITH_CUDA
  if (kind.on_cuda) return grouped_ffn_workspace(s, kind.dtype);
#endif
  return 0;
}

void* scratch(const std::optional<Output>& workspace, [[maybe_unused]] const FfnShape& s,
              const Kind& kind) {
  if (!workspace) return nullptr;
#ifdef HETERPS_WITH_CUDA
  const int64_t bytes = kind.on_cuda ? grouped_ffn_workspace(s, kind.dtype) : 0;
#else
  const int64_t bytes = 0;
#endif
  if (bytes == 0) throw nb::value_error("workspace: expected none");
  check(*workspace, "workspace", nb::dtype<uint8_t>(), kind.device, {bytes});
  return data<void>(*workspace);
}

void forward(const Input& rows, const Input& offsets, const Input& w1, const Input& w2,
             int activation, const Output& out, const std::optional<Output>& pre,
             const std::optional<Output>& act, [[maybe_unused]] uintptr_t stream, int threads,
             const std::optional<Output>& workspace) {
  const FfnShape s = shape_of(rows, w1, w2, activation);
  const Kind kind = kind_of(rows);
  check_inputs(s, kind, rows, offsets, w1, w2);
  check(out, "out", kind.rows, kind.device, {s.rows, s.dim});
  if (pre) check(*pre, "pre", kind.rows, kind.device, {s.rows, s.inner()});
  if (act) check(*act, "act", kind.rows, kind.device, {s.rows, s.hidden});
  FfnArrays arrays{data<void>(rows),  data<int64_t>(offsets), data<void>(w1), data<void>(w2),
                   data_or_null(pre), data_or_null(act),      data<void>(out)};
  arrays.workspace = scratch(workspace, s, kind);
  if (kind.on_cuda) {
#ifdef HETERPS_WITH_CUDA
    if (!act || !pre) throw nb::value_error("pre, act: expected arrays for a CUDA device");
    nb::gil_scoped_release release;
    grouped_ffn_cuda(s, kind.dtype, arrays, stream_of(stream));
#endif
    return;
  }
  nb::gil_scoped_release release;
  grouped_ffn_cpu(s, kind.dtype, arrays, threads);
}

// Throws unless matrices of `size` elements at `at` of each place lie inside it, aligned.
void check_place(const char* name, int64_t at, int64_t size, int64_t item, int64_t step) {
  if (at < 0 || at % item != 0 || size * item > step - at) {
    throw nb::value_error((std::string(name) + ": expected to lie inside a place of " +
                           std::to_string(step) + " bytes, got " + std::to_string(size * item) +
                           " bytes at " + std::to_string(at))
                              .c_str());
  }
}

void forward_at(const Input& rows, const Input& offsets, const Input& places, const Input& memory,
                int64_t w1, int64_t w2, int64_t hidden, int activation, const Output& out,
                int threads) {
  const int64_t dim = size_of(rows, "rows", 1, 2), step = size_of(memory, "memory", 1, 2);
  const FfnShape s{size_of(rows, "rows", 0, 2), size_of(places, "places", 0, 1), dim, hidden,
                   activation_of(activation)};
  const Kind kind = kind_of(rows);
  if (kind.on_cuda) throw nb::value_error("rows: expected an array on a CPU");
  check(rows, "rows", kind.rows, kind.device, {s.rows, dim});
  check(offsets, "offsets", nb::dtype<int64_t>(), kind.device, {s.groups + 1});
  check(places, "places", nb::dtype<int64_t>(), kind.device, {s.groups});
  check(memory, "memory", nb::dtype<uint8_t>(), kind.device,
        {size_of(memory, "memory", 0, 2), step});
  check(out, "out", kind.rows, kind.device, {s.rows, dim});
  const int64_t item = kind.rows.bits / 8;
  if (hidden < 0 || step % item != 0) throw nb::value_error("hidden, memory: out of range");
  check_place("w1", w1, dim * s.inner(), item, step);
  check_place("w2", w2, hidden * dim, item, step);
  const int64_t* place = data<int64_t>(places);
  for (int64_t e = 0; e < s.groups; ++e) {
    if (place[e] >= static_cast<int64_t>(memory.shape(0))) {
      throw nb::value_error("places: expected numbers of places of memory");
    }
  }
  const char* begin = data<char>(memory);
  const FfnArrays arrays{data<void>(rows), data<int64_t>(offsets), begin + w1, begin + w2, nullptr,
                         nullptr,          data<void>(out),        place,      step};
  nb::gil_scoped_release release;
  grouped_ffn_cpu(s, kind.dtype, arrays, threads);
}

void backward(const Input& grad, const Input& rows, const Input& offsets, const Output& pre,
              const Input& w1, const Input& w2, int activation, const std::optional<Output>& act,
              const std::optional<Output>& grad_pre, const std::optional<Output>& grad_rows,
              const std::optional<Output>& grad_w1, const std::optional<Output>& grad_w2,
              [[maybe_unused]] uintptr_t stream, int threads,
              const std::optional<Output>& workspace) {
  const FfnShape s = shape_of(rows, w1, w2, activation);
  const Kind kind = kind_of(rows);
  check_inputs(s, kind, rows, offsets, w1, w2);
  check(grad, "grad", kind.rows, kind.device, {s.rows, s.dim});
  check(pre, "pre", kind.rows, kind.device, {s.rows, s.inner()});
  if (act) check(*act, "act", kind.rows, kind.device, {s.rows, s.hidden});
  if (grad_pre) check(*grad_pre, "grad_pre", kind.rows, kind.device, {s.rows, s.inner()});
  if (grad_rows) check(*grad_rows, "grad_rows", kind.rows, kind.device, {s.rows, s.dim});
  if (grad_w1.has_value() != grad_w2.has_value()) {
    throw nb::value_error("grad_w2: expected an array together with grad_w1");
  }
  if (grad_w1) {
    check(*grad_w1, "grad_w1", kind.rows, kind.device, {s.groups, s.dim, s.inner()});
    check(*grad_w2, "grad_w2", kind.rows, kind.device, {s.groups, s.hidden, s.dim});
  }
  FfnArrays arrays{data<void>(rows), data<int64_t>(offsets), data<void>(w1), data<void>(w2),
                   data<void>(pre),  data_or_null(act),      nullptr};
  arrays.workspace = scratch(workspace, s, kind);
  const FfnGradients gradients{data<void>(grad), data_or_null(grad_pre), data_or_null(grad_rows),
                               data_or_null(grad_w1), data_or_null(grad_w2)};
  if (kind.on_cuda) {
#ifdef HETERPS_WITH_CUDA
    if (!act || !grad_pre) {
      throw nb::value_error("act, grad_pre: expected arrays for a CUDA device");
    }
    nb::gil_scoped_release release;
    grouped_ffn_backward_cuda(s, kind.dtype, arrays, gradients, stream_of(stream));
#endif
    return;
  }
  nb::gil_scoped_release release;
  grouped_ffn_backward_cpu(s, kind.dtype, arrays, gradients, threads);
}

}  // namespace

void bind_grouped_ffn(nb::module_& m) {
  m.def("grouped_ffn_workspace", &workspace_of, "rows"_a.noconvert(), "w1"_a.noconvert(),
        "w2"_a.noconvert(), "activation"_a,
        "Bytes of scratch (uint8) that the two below take on a GPU with a way of its own; else 0.");
  m.def("grouped_ffn", &forward, "rows"_a.noconvert(), "offsets"_a.noconvert(), "w1"_a.noconvert(),
        "w2"_a.noconvert(), "activation"_a, "out"_a.noconvert(), "pre"_a.noconvert().none(),
        "act"_a.noconvert().none(), "stream"_a = 0, "threads"_a = 1,
        "workspace"_a.noconvert().none() = nb::none(),
        "out[r] = activate(rows[r] w1[e]) w2[e], e being the group of row r.");
  m.def(
      "grouped_ffn_at", &forward_at, "rows"_a.noconvert(), "offsets"_a.noconvert(),
      "places"_a.noconvert(), "memory"_a.noconvert(), "w1"_a, "w2"_a, "hidden"_a, "activation"_a,
      "out"_a.noconvert(), "threads"_a = 1,
      "grouped_ffn on a CPU of groups whose matrices lie w1 and w2 bytes inside memory[places[e]]; "
      "rows of a group with a negative place are not computed.");
  m.def("grouped_ffn_backward", &backward, "grad"_a.noconvert(), "rows"_a.noconvert(),
        "offsets"_a.noconvert(), "pre"_a.noconvert(), "w1"_a.noconvert(), "w2"_a.noconvert(),
        "activation"_a, "act"_a.noconvert().none(), "grad_pre"_a.noconvert().none(),
        "grad_rows"_a.noconvert().none(), "grad_w1"_a.noconvert().none(),
        "grad_w2"_a.noconvert().none(), "stream"_a = 0, "threads"_a = 1,
        "workspace"_a.noconvert().none() = nb::none(),
        "Gradients of grouped_ffn; act and grad_pre are scratch, on a CUDA device.");
}

}  // namespace heterps
