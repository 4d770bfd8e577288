#include "heterps/route.h"

#include "arrays.h"

namespace heterps {
namespace {

Grouping grouping_of(const int32_t* chosen, int64_t pairs, const Output& order,
                     const Output& inverse, const Output& offsets, int64_t experts, int device) {
  check(order, "order", nb::dtype<int64_t>(), device, {pairs});
  check(inverse, "inverse", nb::dtype<int64_t>(), device, {pairs});
  check(offsets, "offsets", nb::dtype<int64_t>(), device, {experts + 1});
  return {
      chosen, pairs, experts, data<int64_t>(order), data<int64_t>(inverse), data<int64_t>(offsets)};
}

#ifdef HETERPS_WITH_CUDA
int64_t* scratch_of(const Grouping& grouping, const std::optional<Output>& workspace, int device) {
  if (!workspace) throw nb::value_error("workspace: expected an array for a CUDA device");
  const int64_t size = group_workspace(grouping.pairs, grouping.experts);
  check(*workspace, "workspace", nb::dtype<int64_t>(), device, {size});
  return data<int64_t>(*workspace);
}
#endif

void route(const Input& logits, int64_t k, const Output& chosen, const Output& order,
           const Output& inverse, const Output& offsets, const std::optional<Output>& workspace,
           [[maybe_unused]] uintptr_t stream, int threads) {
  const int64_t tokens = size_of(logits, "logits", 0, 2);
  const int64_t experts = size_of(logits, "logits", 1, 2);
  const int device = logits.device_type();
  const bool on_cuda = is_cuda(logits);
  if (experts > INT32_MAX || k < 1 || k > experts) {
    throw nb::value_error(("k: expected 1 to the number of experts, " + std::to_string(experts) +
                           ", got " + std::to_string(k))
                              .c_str());
  }
  check(logits, "logits", nb::dtype<float>(), device, {tokens, experts});
  check(chosen, "chosen", nb::dtype<int32_t>(), device, {tokens, k});
  const Choice choice{data<float>(logits), tokens, experts, k, data<int32_t>(chosen)};
  const Grouping grouping =
      grouping_of(data<int32_t>(chosen), tokens * k, order, inverse, offsets, experts, device);
  if (on_cuda) {
#ifdef HETERPS_WITH_CUDA
    int64_t* scratch = scratch_of(grouping, workspace, device);
    nb::gil_scoped_release release;
    choose_cuda(choice, stream_of(stream));
    group_cuda(grouping, scratch, stream_of(stream));
#endif
  } else {
    nb::gil_scoped_release release;
    choose_cpu(choice, threads);
    group_cpu(grouping);
  }
}

void group(const Input& chosen, int64_t experts, const Output& order, const Output& inverse,
           const Output& offsets, const std::optional<Output>& workspace,
           [[maybe_unused]] uintptr_t stream) {
  const int64_t pairs = size_of(chosen, "chosen", 0, 1);
  const int device = chosen.device_type();
  if (experts < 1 || experts > INT32_MAX) {
    throw nb::value_error("experts: expected at least 1");
  }
  check(chosen, "chosen", nb::dtype<int32_t>(), device, {pairs});
  const Grouping grouping =
      grouping_of(data<int32_t>(chosen), pairs, order, inverse, offsets, experts, device);
  if (is_cuda(chosen)) {
#ifdef HETERPS_WITH_CUDA
    int64_t* scratch = scratch_of(grouping, workspace, device);
    nb::gil_scoped_release release;
    group_cuda(grouping, scratch, stream_of(stream));
#endif
  } else {
    nb::gil_scoped_release release;
    group_cpu(grouping);
  }
}

Weighing weighing_of(const Input& chosen, int64_t experts) {
  const int64_t tokens = size_of(chosen, "chosen", 0, 2), k = size_of(chosen, "chosen", 1, 2);
  check(chosen, "chosen", nb::dtype<int32_t>(), nb::device::cpu::value, {tokens, k});
  return {data<int32_t>(chosen), tokens, experts, k};
}

void weigh(const Input& logits, const Input& chosen, const Output& weights, int threads) {
  const Weighing w = weighing_of(chosen, size_of(logits, "logits", 1, 2));
  check(logits, "logits", nb::dtype<float>(), nb::device::cpu::value, {w.tokens, w.experts});
  check(weights, "weights", nb::dtype<float>(), nb::device::cpu::value, {w.tokens, w.k});
  nb::gil_scoped_release release;
  weigh_cpu(w, data<float>(logits), data<float>(weights), threads);
}

void weigh_backward(const Input& weights, const Input& grad, const Input& chosen,
                    const Output& gradient, int threads) {
  const Weighing w =
      weighing_of(chosen, gradient.ndim() == 2 ? static_cast<int64_t>(gradient.shape(1)) : 0);
  check(gradient, "gradient", nb::dtype<float>(), nb::device::cpu::value, {w.tokens, w.experts});
  check(weights, "weights", nb::dtype<float>(), nb::device::cpu::value, {w.tokens, w.k});
  check(grad, "grad", nb::dtype<float>(), nb::device::cpu::value, {w.tokens, w.k});
  nb::gil_scoped_release release;
  weigh_backward_cpu(w, data<float>(weights), data<float>(grad), data<float>(gradient), threads);
}

int64_t workspace_size(int64_t pairs, int64_t experts) {
#ifdef HETERPS_WITH_CUDA
  return group_workspace(pairs, experts);
#else
  (void)pairs, (void)experts;
  return 0;
#endif
}

}  // namespace

void bind_route(nb::module_& m) {
  m.def("group_workspace", &workspace_size, "pairs"_a, "experts"_a,
        "int64 elements of scratch memory that `route` and `group` need on a CUDA device.");
  m.def("route", &route, "logits"_a.noconvert(), "k"_a, "chosen"_a.noconvert(),
        "order"_a.noconvert(), "inverse"_a.noconvert(), "offsets"_a.noconvert(),
        "workspace"_a.noconvert() = nb::none(), "stream"_a = 0, "threads"_a = 1,
        "Chooses k experts for each token and groups the pairs by expert.");
  m.def("group", &group, "chosen"_a.noconvert(), "experts"_a, "order"_a.noconvert(),
        "inverse"_a.noconvert(), "offsets"_a.noconvert(), "workspace"_a.noconvert() = nb::none(),
        "stream"_a = 0, "Groups pairs by the expert that was chosen for each.");
  m.def("weigh", &weigh, "logits"_a.noconvert(), "chosen"_a.noconvert(), "weights"_a.noconvert(),
        "threads"_a = 1, "The softmax over each token's chosen logits, on a CPU.");
  m.def("weigh_backward", &weigh_backward, "weights"_a.noconvert(), "grad"_a.noconvert(),
        "chosen"_a.noconvert(), "gradient"_a.noconvert(), "threads"_a = 1,
        "The gradient of the logits from that of the weights.");
}

}  // namespace heterps
