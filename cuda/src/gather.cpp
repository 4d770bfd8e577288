#include "heterps/gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace heterps {
namespace {

void check_below(int64_t index, int64_t limit, const char* name) {
  if (index >= limit) {
    throw std::out_of_range(std::string(name) + " holds " + std::to_string(index) +
                            ", expected less than " + std::to_string(limit));
  }
}

// Eight running sums: a fixed order of additions that still fills vector registers.
template <typename T>
T dot(const T* a, const T* b, int64_t n) {
  constexpr int64_t kLanes = 8;
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  T sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (T lane : lanes) sum += lane;
  return sum;
}

}  // namespace

template <typename T>
void gather_rows_cpu(const GatherShape& shape, const T* x, const T* w, const int64_t* order,
                     T* rows) {
  const int64_t dim = shape.dim;
  for (int64_t p = 0; p < shape.rows; ++p, rows += dim) {
    const int64_t pair = order[p];
    if (pair < 0) throw std::out_of_range("order holds a negative index");
    check_below(pair, shape.tokens * shape.k, "order");
    const T* source = x + pair / shape.k * dim;
    if (w == nullptr) {
      std::copy_n(source, dim, rows);
    } else {
      const T scale = w[pair];
      for (int64_t d = 0; d < dim; ++d) rows[d] = scale * source[d];
    }
  }
}

template <typename T>
void gather_sum_cpu(const GatherShape& shape, const T* rows, const T* w, const int64_t* inverse,
                    T* x) {
  const int64_t dim = shape.dim;
  for (int64_t t = 0; t < shape.tokens; ++t, x += dim) {
    std::fill_n(x, dim, T{0});
    for (int64_t pair = t * shape.k; pair < (t + 1) * shape.k; ++pair) {
      const int64_t position = inverse[pair];
      if (position < 0) continue;
      check_below(position, shape.rows, "inverse");
      const T* source = rows + position * dim;
      const T scale = w == nullptr ? T{1} : w[pair];
      for (int64_t d = 0; d < dim; ++d) x[d] += scale * source[d];
    }
  }
}

template <typename T>
void gather_dot_cpu(const GatherShape& shape, const T* x, const T* rows, const int64_t* inverse,
                    T* w) {
  const int64_t dim = shape.dim;
  for (int64_t pair = 0; pair < shape.tokens * shape.k; ++pair) {
    const int64_t position = inverse[pair];
    check_below(position, shape.rows, "inverse");
    w[pair] = position < 0 ? T{0} : dot(x + pair / shape.k * dim, rows + position * dim, dim);
  }
}

#define HETERPS_INSTANTIATE(T)                                                                  \
  template void gather_rows_cpu<T>(const GatherShape&, const T*, const T*, const int64_t*, T*); \
  template void gather_sum_cpu<T>(const GatherShape&, const T*, const T*, const int64_t*, T*);  \
  template void gather_dot_cpu<T>(const GatherShape&, const T*, const T*, const int64_t*, T*);
HETERPS_INSTANTIATE(float)
HETERPS_INSTANTIATE(double)
#undef HETERPS_INSTANTIATE

}  // namespace heterps
