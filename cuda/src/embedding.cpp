#include "heterps/embedding.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "heterps/half.h"
#include "parallel.h"

namespace heterps {
namespace {

void check_range(int64_t index, int64_t limit, const char* name) {
  if (index < 0 || index >= limit) {
    throw std::out_of_range(std::string(name) + " holds " + std::to_string(index) +
                            ", expected 0 to " + std::to_string(limit - 1));
  }
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

// Calls work(first, end, gradient) for the segments, the gradient of each summed in order.
template <typename T, typename Work>
void for_segments(const PoolShape& shape, const SegmentInputs& in, int threads, const Work& work) {
  using S = Sum<T>;
  const int64_t n = shape.ids, dim = shape.dim;
  const T* grad = static_cast<const T*>(in.grad);
  const S* scale = static_cast<const S*>(in.scale);
  for (int64_t p = 0; p < n; ++p) {
    check_range(in.sorted[p], shape.rows, "ids");
    check_range(in.source[p], n, "source");
    check_range(in.bag[p], shape.bags, "bag");
  }
  parallel_parts(n, dim, threads, [&](int64_t begin, int64_t end) {
    std::vector<S> sums(dim);
    while (begin < end && begin > 0 && in.sorted[begin] == in.sorted[begin - 1]) ++begin;
    for (int64_t p = begin; p < end;) {  // a segment belongs to the part where it begins
      const int64_t first = p;
      std::fill(sums.begin(), sums.end(), S{0});
      for (; p < n && in.sorted[p] == in.sorted[first]; ++p) {
        const int64_t i = in.source[p];
        const S factor = scale == nullptr ? S{1} : scale[i];
        const T* row = grad + in.bag[i] * dim;
        for (int64_t d = 0; d < dim; ++d) sums[d] += factor * static_cast<S>(row[d]);
      }
      work(first, p, sums.data());
    }
  });
}

template <typename T>
void update(const PoolShape& shape, const RowOptimizer& optimizer, int64_t id, const Sum<T>* g,
            T* table, Sum<T>* state) {
  using S = Sum<T>;
  const int64_t dim = shape.dim;
  if (dim == 0) return;  // no mean of no squares
  const S rate = static_cast<S>(optimizer.rate), epsilon = static_cast<S>(optimizer.epsilon);
  T* w = table + id * dim;
  S divisor = 1;
  if (optimizer.rule == RowRule::kRowwiseAdagrad) {
    S squares = 0;
    for (int64_t d = 0; d < dim; ++d) squares += g[d] * g[d];
    state[id] += squares / static_cast<S>(dim);
    divisor = std::sqrt(state[id]) + epsilon;
  }
  for (int64_t d = 0; d < dim; ++d) {
    if (optimizer.rule == RowRule::kAdagrad) {
      S& sum = state[id * dim + d];
      sum += g[d] * g[d];
      divisor = std::sqrt(sum) + epsilon;
    }
    w[d] = static_cast<T>(static_cast<S>(w[d]) - rate * (g[d] / divisor));
  }
}

}  // namespace

void embedding_pool_cpu(const PoolShape& shape, DType dtype, const PoolInputs& in,
                        const void* table, void* out, int threads) {
  for (int64_t b = 0; b < shape.bags; ++b) {
    if (in.offsets[b] > in.offsets[b + 1]) throw std::out_of_range("offsets: expected to ascend");
  }
  if (in.offsets[0] != 0 || in.offsets[shape.bags] != shape.ids) {
    throw std::out_of_range("offsets: expected to go from 0 to " + std::to_string(shape.ids) +
                            ", the number of ids");
  }
  dispatch(dtype, [&]<typename T>(T*) {
    using S = Sum<T>;
    const int64_t dim = shape.dim;
    const S* scale = static_cast<const S*>(in.scale);
    const int64_t mean = shape.bags > 0 ? shape.ids / shape.bags + 1 : 1;
    parallel_parts(shape.bags, dim * mean, threads, [&](int64_t begin, int64_t end) {
      std::vector<S> sums(dim);
      for (int64_t b = begin; b < end; ++b) {
        std::fill(sums.begin(), sums.end(), S{0});
        for (int64_t i = in.offsets[b]; i < in.offsets[b + 1]; ++i) {
          check_range(in.ids[i], shape.rows, "ids");
          const S factor = scale == nullptr ? S{1} : scale[i];
          const T* row = static_cast<const T*>(table) + in.ids[i] * dim;
          for (int64_t d = 0; d < dim; ++d) sums[d] += factor * static_cast<S>(row[d]);
        }
        T* to = static_cast<T*>(out) + b * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(sums[d]);
      }
    });
  });
}

void embedding_segments_cpu(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                            void* rows, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    for_segments<T>(shape, in, threads, [&](int64_t first, int64_t end, const Sum<T>* g) {
      T* to = static_cast<T*>(rows) + first * shape.dim;
      for (int64_t d = 0; d < shape.dim; ++d) to[d] = static_cast<T>(g[d]);
      std::fill(to + shape.dim, to + (end - first) * shape.dim, T(0.0f));
    });
  });
}

void embedding_update_cpu(const PoolShape& shape, DType dtype, const SegmentInputs& in,
                          const RowOptimizer& optimizer, void* table, void* state, int threads) {
  dispatch(dtype, [&]<typename T>(T*) {
    for_segments<T>(shape, in, threads, [&](int64_t first, int64_t, const Sum<T>* g) {
      update(shape, optimizer, in.sorted[first], g, static_cast<T*>(table),
             static_cast<Sum<T>*>(state));
    });
  });
}

}  // namespace heterps
