#include "heterps/route.h"

#include "arrays.h"

namespace heterps {
namespace {

void route(const Input& logits, int64_t k, const Output& chosen, const Output& order,
           const Output& inverse, const Output& offsets, const std::optional<Output>& workspace,
           [[maybe_unused]] uintptr_t stream, int threads) {
  const int64_t tokens = size_of(logits, "logits", 0, 2);
  const int64_t experts = size_of(logits, "logits", 1, 2);
  const int64_t pairs = tokens * k;
  const int device = logits.device_type();
  const bool on_cuda = is_cuda(logits);
  if (experts > INT32_MAX || k < 1 || k > experts) {
    throw nb::value_error(("k: expected 1 to the number of experts, " + std::to_string(experts) +
                           ", got " + std::to_string(k))
                              .c_str());
  }
  check(logits, "logits", nb::dtype<float>(), device, {tokens, experts});
  check(chosen, "chosen", nb::dtype<int32_t>(), device, {tokens, k});
  check(order, "order", nb::dtype<int64_t>(), device, {pairs});
  check(inverse, "inverse", nb::dtype<int64_t>(), device, {pairs});
  check(offsets, "offsets", nb::dtype<int64_t>(), device, {experts + 1});
  const RouteArgs args{data<float>(logits),
                       tokens,
                       experts,
                       k,
                       data<int32_t>(chosen),
                       data<int64_t>(order),
                       data<int64_t>(inverse),
                       data<int64_t>(offsets)};
  if (on_cuda) {
#ifdef HETERPS_WITH_CUDA
    if (!workspace) throw nb::value_error("workspace: expected an array for a CUDA device");
    check(*workspace, "workspace", nb::dtype<int64_t>(), device, {route_workspace(pairs, experts)});
    nb::gil_scoped_release release;
    route_cuda(args, data<int64_t>(*workspace), stream_of(stream));
#endif
  } else {
    nb::gil_scoped_release release;
    route_cpu(args, threads);
  }
}

int64_t workspace_size(int64_t pairs, int64_t experts) {
#ifdef HETERPS_WITH_CUDA
  return route_workspace(pairs, experts);
#else
  (void)pairs, (void)experts;
  return 0;
#endif
}

}  // namespace

void bind_route(nb::module_& m) {
  m.def("route_workspace", &workspace_size, "pairs"_a, "experts"_a,
        "int64 elements of scratch memory that `route` needs on a CUDA device.");
  m.def("route", &route, "logits"_a.noconvert(), "k"_a, "chosen"_a.noconvert(),
        "order"_a.noconvert(), "inverse"_a.noconvert(), "offsets"_a.noconvert(),
        "workspace"_a.noconvert() = nb::none(), "stream"_a = 0, "threads"_a = 1,
        "Chooses k experts for each token and groups the pairs by expert.");
}

}  // namespace heterps
