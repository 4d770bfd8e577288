// ps._native.Pieces: a client's batch, asked for piece by piece.
#include "batch/pieces.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "bindings/python.h"
#include "table/hash.h"

namespace heterps::ps {
namespace {

using namespace nb::literals;

// With the buffers that it reads.
class HeldPieces {
 public:
  HeldPieces(nb::handle keys_object, nb::handle route_object, uint32_t shards)
      : keys_(keys_object), n_(keys_.Count(8, "keys")) {
    View route(route_object);
    route.Expect(sizeof(route_), "route");
    std::memcpy(route_.data(), route.data(), sizeof(route_));
    if (std::any_of(route_.begin(), route_.end(), [&](uint16_t to) { return to >= shards; }))
      throw std::invalid_argument("route: a bucket of a shard that is not there");
    pieces_ = std::make_unique<Pieces>(keys_.data(), n_, route_.data(), shards);
  }

  nb::list Next(size_t end) {
    std::vector<std::vector<uint64_t>> found;
    {
      nb::gil_scoped_release released;
      found = pieces_->Next(end);
    }
    nb::list out;
    for (auto& keys : found) out.append(ToArray(std::move(keys)));
    return out;
  }

  void Spread(size_t begin, size_t end, nb::handle rows_object, nb::handle out_object, size_t dim,
              bool parallel) const {
    View rows(rows_object), out(out_object, true);
    const size_t row = dim * sizeof(float);
    out.Expect(n_ * row, "room for rows");
    if (rows.size() < pieces_->asked() * row) throw std::invalid_argument("rows are missing");
    nb::gil_scoped_release released;
    pieces_->Spread(begin, end, reinterpret_cast<const float*>(rows.data()), dim,
                    reinterpret_cast<float*>(out.writable()), parallel);
  }

  size_t straight() const { return pieces_->straight(); }
  size_t asked() const { return pieces_->asked(); }

 private:
  View keys_;
  size_t n_;
  std::array<uint16_t, kBuckets> route_;
  std::unique_ptr<Pieces> pieces_;
};

}  // namespace

void BindPieces(nb::module_& m) {
  nb::class_<HeldPieces>(m, "Pieces")
      .def(nb::init<nb::handle, nb::handle, uint32_t>(), "keys"_a, "route"_a, "shards"_a)
      .def("next", &HeldPieces::Next, "end"_a)
      .def("spread", &HeldPieces::Spread, "begin"_a, "end"_a, "rows"_a, "out"_a, "dim"_a,
           "parallel"_a)
      .def_prop_ro("straight", &HeldPieces::straight)
      .def_prop_ro("asked", &HeldPieces::asked);
}

}  // namespace heterps::ps
