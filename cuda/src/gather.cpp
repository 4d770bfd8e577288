#include "heterps/gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "heterps/half.h"
#include "parallel.h"

namespace heterps {
namespace {

void check_below(int64_t index, int64_t limit, const char* name) {
  if (index >= limit) {
    throw std::out_of_range(std::string(name) + " holds " + std::to_string(index) +
                            ", expected less than " + std::to_string(limit));
  }
}

// The row of this position, asked for ahead of its turn: rows lie in the order of experts, so that
// the processor cannot know which comes next.
template <typename T>
void ask(const T* rows, int64_t position, int64_t dim) {
  const uint64_t size = static_cast<uint64_t>(dim) * sizeof(T);
  const uint64_t row = reinterpret_cast<uint64_t>(rows) + static_cast<uint64_t>(position) * size;
  for (uint64_t line = 0; position >= 0 && line < size; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(row + line));
  }
}

// Eight running sums: a fixed order of additions that still fills vector registers.
template <typename T>
Sum<T> dot(const T* a, const T* b, int64_t n) {
  using S = Sum<T>;
  constexpr int64_t kLanes = 8;
  S lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<S>(a[i + lane]) * static_cast<S>(b[i + lane]);
    }
  }
  S sum = 0;
  for (; i < n; ++i) sum += static_cast<S>(a[i]) * static_cast<S>(b[i]);
  for (S lane : lanes) sum += lane;
  return sum;
}

// Which pair a row is of.
int64_t pair_of(const GatherShape& shape, const int64_t* order, int64_t row) {
  if (order[row] < 0) throw std::out_of_range("order holds a negative index");
  check_below(order[row], shape.tokens * shape.k, "order");
  return order[row];
}

template <typename T>
void gather_rows(const GatherShape& shape, const T* x, const Sum<T>* w, const int64_t* order,
                 T* rows, int threads) {
  const int64_t dim = shape.dim;
  parallel_parts(shape.rows, dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t pair = pair_of(shape, order, p);
      const T* source = x + pair / shape.k * dim;
      T* to = rows + p * dim;
      if (w == nullptr) {
        std::copy_n(source, dim, to);
      } else {
        const Sum<T> scale = w[pair];
        for (int64_t d = 0; d < dim; ++d) {
          to[d] = static_cast<T>(scale * static_cast<Sum<T>>(source[d]));
        }
      }
    }
  });
}

template <typename T>
void gather_sum(const GatherShape& shape, const T* rows, const Sum<T>* w, const int64_t* inverse,
                T* x, int threads) {
  const int64_t dim = shape.dim;
  parallel_parts(shape.tokens, dim * shape.k, threads, [&](int64_t begin, int64_t end) {
    std::vector<Sum<T>> sums(dim);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sums.begin(), sums.end(), Sum<T>{0});
      for (int64_t pair = t * shape.k; pair < (t + 1) * shape.k; ++pair) {
        const int64_t position = inverse[pair];
        if (pair + 1 < end * shape.k) ask(rows, inverse[pair + 1], dim);
        if (position < 0) continue;
        check_below(position, shape.rows, "inverse");
        const T* source = rows + position * dim;
        const Sum<T> scale = w == nullptr ? Sum<T>{1} : w[pair];
        Sum<T>* to = sums.data();
        for (int64_t d = 0; d < dim; ++d) to[d] += scale * static_cast<Sum<T>>(source[d]);
      }
      for (int64_t d = 0; d < dim; ++d) x[t * dim + d] = static_cast<T>(sums[d]);
    }
  });
}

template <typename T>
void gather_dot(const GatherShape& shape, const T* x, const T* rows, const int64_t* inverse,
                Sum<T>* w, int threads) {
  const int64_t dim = shape.dim;
  parallel_parts(shape.tokens * shape.k, dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t position = inverse[pair];
      check_below(position, shape.rows, "inverse");
      if (pair + 1 < end) ask(rows, inverse[pair + 1], dim);
      w[pair] =
          position < 0 ? Sum<T>{0} : dot(x + pair / shape.k * dim, rows + position * dim, dim);
    }
  });
}

template <typename T>
void rows_dot(const GatherShape& shape, const T* x, const T* rows, const int64_t* order, Sum<T>* w,
              int threads) {
  const int64_t dim = shape.dim;
  parallel_parts(shape.rows, dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t pair = pair_of(shape, order, p);
      w[pair] = dot(x + pair / shape.k * dim, rows + p * dim, dim);
    }
  });
}

// Calls `work` with a null pointer of the element type.
template <typename Work>
void dispatch(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return work(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return work(static_cast<double*>(nullptr));
    case DType::kFloat16:
      return work(static_cast<Float16*>(nullptr));
    case DType::kBFloat16:
      return work(static_cast<BFloat16*>(nullptr));
  }
}

}  // namespace

void gather_rows_cpu(const GatherShape& shape, DType dtype, const void* x, const void* w,
                     const int64_t* order, void* rows, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    gather_rows(shape, static_cast<const T*>(x), static_cast<const Sum<T>*>(w), order,
                static_cast<T*>(rows), threads);
  });
}

void gather_sum_cpu(const GatherShape& shape, DType dtype, const void* rows, const void* w,
                    const int64_t* inverse, void* x, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    gather_sum(shape, static_cast<const T*>(rows), static_cast<const Sum<T>*>(w), inverse,
               static_cast<T*>(x), threads);
  });
}

void gather_dot_cpu(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                    const int64_t* inverse, void* w, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    gather_dot(shape, static_cast<const T*>(x), static_cast<const T*>(rows), inverse,
               static_cast<Sum<T>*>(w), threads);
  });
}

void rows_dot_cpu(const GatherShape& shape, DType dtype, const void* x, const void* rows,
                  const int64_t* order, void* w, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    rows_dot(shape, static_cast<const T*>(x), static_cast<const T*>(rows), order,
             static_cast<Sum<T>*>(w), threads);
  });
}

}  // namespace heterps
