// The steps between the products of grouped_ffn where these are not fused with them. Runs are
// whole: widths are multiples of 8 and arrays aligned.
#pragma once

#include <cstdint>

#include "heterps/activation.cuh"
#include "heterps/row_threads.cuh"
#include "heterps/run.cuh"

namespace heterps {

// act = activate(pre); 2^bits threads for each row. 16-bit types.
template <typename T>
__global__ void ffn_activate_kernel(int bits, int64_t rows, int64_t hidden, Activation kind,
                                    const T* __restrict__ pre, T* __restrict__ act) {
  constexpr int N = kRun<T>;
  const int64_t row = row_of_thread(bits);
  if (row >= rows) return;
  const bool gated = kind == Activation::kSwiglu;
  const T* from = pre + row * (gated ? 2 : 1) * hidden;
  for (int64_t h = N * thread_of_row(bits); h < hidden; h += int64_t{N} << bits) {
    float x[N], y[N], result[N];
    load_run(x, from + h, N, true);
    if (gated) load_run(y, from + hidden + h, N, true);
    for (int n = 0; n < N; ++n) result[n] = activated(kind, x[n], gated ? y[n] : 1.0f);
    store_run(act + row * hidden + h, result, N, true);
  }
}

// From the gradient of act, which lies in `act`, that of pre; and act itself, in its place.
template <typename T>
__global__ void ffn_slope_kernel(int bits, int64_t rows, int64_t hidden, Activation kind,
                                 const T* __restrict__ pre, T* __restrict__ act,
                                 T* __restrict__ grad_pre) {
  constexpr int N = kRun<T>;
  const int64_t row = row_of_thread(bits);
  if (row >= rows) return;
  const bool gated = kind == Activation::kSwiglu;
  const int64_t begin = row * (gated ? 2 : 1) * hidden;
  for (int64_t h = N * thread_of_row(bits); h < hidden; h += int64_t{N} << bits) {
    float grad[N], x[N], y[N], result[N], of_gate[N], of_value[N];
    load_run(grad, act + row * hidden + h, N, true);
    load_run(x, pre + begin + h, N, true);
    if (gated) load_run(y, pre + begin + hidden + h, N, true);
    for (int n = 0; n < N; ++n) {
      const float value = gated ? y[n] : 1.0f;
      result[n] = activated(kind, x[n], value);
      of_gate[n] = grad[n] * slope(kind, x[n], value);
      of_value[n] = grad[n] * x[n] * logistic(x[n]);
    }
    store_run(act + row * hidden + h, result, N, true);
    store_run(grad_pre + begin + h, of_gate, N, true);
    if (gated) store_run(grad_pre + begin + hidden + h, of_value, N, true);
  }
}

}  // namespace heterps
