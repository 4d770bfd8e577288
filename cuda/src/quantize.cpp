#include "heterps/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"

namespace heterps {

void quantize_rows_cpu(int64_t rows, int64_t dim, const float* x, int8_t* q, float* scale,
                       int threads) {
  parallel_parts(rows, dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = x + r * dim;
      int8_t* to = q + r * dim;
      float most = 0, poison = 0;  // the latter stays zero while all are finite
      for (int64_t d = 0; d < dim; ++d) {
        most = std::max(most, std::fabs(from[d]));
        poison += from[d] * 0.0f;
      }
      const float unit = poison == 0 ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
      scale[r] = unit;
      if (!(unit > 0)) {
        std::fill_n(to, dim, int8_t{0});
        continue;
      }
      for (int64_t d = 0; d < dim; ++d) {
        const float value = std::nearbyint(from[d] / unit);
        to[d] = static_cast<int8_t>(std::clamp(value, -127.0f, 127.0f));
      }
    }
  });
}

void dequantize_rows_cpu(int64_t rows, int64_t dim, const int8_t* q, const float* scale, float* x,
                         int threads) {
  parallel_parts(rows, dim, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t d = 0; d < dim; ++d)
        x[r * dim + d] = scale[r] * static_cast<float>(q[r * dim + d]);
    }
  });
}

}  // namespace heterps
