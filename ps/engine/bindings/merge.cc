// ps._native: what a shard does to the parts of a step.
#include "batch/merge.h"

#include "bindings/python.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

// Each part: keys, their bytes, and float32 rows. Distinct keys, and the sums of their rows.
nb::tuple MergeParts(nb::list parts, size_t dim) {
  std::vector<View> views;  // hold the buffers
  views.reserve(2 * nb::len(parts));
  std::vector<KeyedRows> given;
  for (nb::handle item : parts) {
    auto fields = nb::cast<nb::tuple>(item);
    const View& keys = views.emplace_back(View(fields[0]));
    const size_t key_bytes = CheckKeyBytes(nb::cast<size_t>(fields[1]));
    const View& rows = views.emplace_back(View(fields[2]));
    const size_t count = keys.Count(key_bytes, "keys");
    rows.Expect(count * dim * sizeof(float), "gradients");
    given.push_back({keys.data(), key_bytes, rows.data(), count});
  }
  Merged merged;
  {
    nb::gil_scoped_release released;
    Merge(given, dim, &merged);
  }
  float* sums = merged.sums.release();
  nb::capsule owner(sums, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::make_tuple(ToArray(std::move(merged.keys), merged.count),
                        Floats(sums, {merged.count, dim}, owner));
}

double SquaredNormOf(nb::handle values_object) {
  View values(values_object);
  const size_t n = values.Count(sizeof(float), "values");
  nb::gil_scoped_release released;
  return SquaredNorm(values.data(), n);
}

nb::object ScaledBy(nb::handle values_object, double scale) {
  View values(values_object);
  const size_t n = values.Count(sizeof(float), "values");
  auto out = std::make_unique_for_overwrite<float[]>(n);
  {
    nb::gil_scoped_release released;
    Scale(values.data(), n, scale, out.get());
  }
  return ToArray(std::move(out), n);
}

}  // namespace

void BindMerge(nb::module_& m) {
  m.def("merge", &MergeParts, "parts"_a, "dim"_a);
  m.def("squared_norm", &SquaredNormOf, "values"_a);
  m.def("scaled", &ScaledBy, "values"_a, "scale"_a);
}

}  // namespace heterps::ps
