// ps._native: bags of rows.
#include "batch/bags.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "bindings/python.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

using Picked = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;

Pooling PoolingOf(const std::string& name) {
  return Lookup<Pooling>(
      name, {{"sum", Pooling::kSum}, {"mean", Pooling::kMean}, {"max", Pooling::kMax}}, "pooling");
}

// Views that hold what `bags` points at.
struct Given {
  Given(nb::handle inverse_object, const nb::object& there_object, size_t length, size_t dim)
      : inverse(inverse_object) {
    const size_t n = inverse.Count(8, "inverse");
    if (length == 0 || n % length != 0) {
      throw std::invalid_argument("inverse: " + std::to_string(n) + " keys are no bags of " +
                                  std::to_string(length));
    }
    if (!there_object.is_none()) {
      there.emplace(there_object);
      there->Expect(n, "there");
    }
    const auto* said = there ? reinterpret_cast<const uint8_t*>(there->data()) : nullptr;
    bags = {reinterpret_cast<const int64_t*>(inverse.data()), said, n / length, length, dim};
  }

  void Check(size_t rows) const {
    if (rows > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
      throw std::invalid_argument("more rows than a bag can name");
    }
    uint64_t highest = 0;  // a negative index is a huge unsigned one
    const size_t n = bags.count * bags.length;
    for (size_t i = 0; i < n; ++i) {
      highest = std::max(highest, static_cast<uint64_t>(bags.inverse[i]));
    }
    if (n > 0 && highest >= rows) {
      throw std::invalid_argument("inverse: an index is not below " + std::to_string(rows));
    }
  }

  View inverse;
  std::optional<View> there;
  Bags bags;
};

// [bags, dim] of rows [*, dim]; with it, of a maximum, which rows it is of.
nb::tuple PoolRows(nb::handle rows_object, nb::handle inverse_object, nb::object there_object,
                   size_t length, size_t dim, const std::string& pooling) {
  View rows(rows_object);
  const Given given(inverse_object, there_object, length, dim);
  const size_t count = rows.Count(dim * sizeof(float), "rows");
  const Pooling as = PoolingOf(pooling);
  Floats out = NewFloats(given.bags.count, dim);
  int32_t* picked = as == Pooling::kMax ? new int32_t[given.bags.count * dim] : nullptr;
  nb::capsule owner(picked, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  {
    nb::gil_scoped_release released;
    given.Check(count);
    Pool(given.bags, as, reinterpret_cast<const float*>(rows.data()), out.data(), picked);
  }
  if (!picked) return nb::make_tuple(out, nb::none());
  return nb::make_tuple(out, Picked(picked, {given.bags.count, dim}, owner));
}

// The rows' gradients, of the bags'.
Floats PoolGrads(nb::handle grads_object, nb::handle inverse_object, nb::object there_object,
                 nb::object picked_object, size_t length, size_t rows, size_t dim,
                 const std::string& pooling) {
  View grads(grads_object);
  const Given given(inverse_object, there_object, length, dim);
  grads.Expect(given.bags.count * dim * sizeof(float), "gradients");
  const Pooling as = PoolingOf(pooling);
  std::optional<View> picked;
  if (as == Pooling::kMax) {
    picked.emplace(picked_object);
    picked->Expect(given.bags.count * dim * sizeof(int32_t), "picked");
  }
  Floats out = NewFloats(rows, dim);
  nb::gil_scoped_release released;
  given.Check(rows);
  const auto* from = picked ? reinterpret_cast<const int32_t*>(picked->data()) : nullptr;
  for (size_t i = 0; from && i < given.bags.count * dim; ++i) {
    if (from[i] >= static_cast<int64_t>(rows)) {
      throw std::invalid_argument("picked: a row is not below " + std::to_string(rows));
    }
  }
  PoolGradients(given.bags, as, reinterpret_cast<const float*>(grads.data()), from, rows,
                out.data());
  return out;
}

}  // namespace

void BindBags(nb::module_& m) {
  m.def("pool", &PoolRows, "rows"_a, "inverse"_a, "there"_a.none(), "length"_a, "dim"_a,
        "pooling"_a);
  m.def("pool_grads", &PoolGrads, "grads"_a, "inverse"_a, "there"_a.none(), "picked"_a.none(),
        "length"_a, "rows"_a, "dim"_a, "pooling"_a);
}

}  // namespace heterps::ps
