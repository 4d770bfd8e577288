// The steps between the products of grouped_ffn where these are not fused with them. Runs are
// whole: widths are multiples of 8 and arrays aligned.
#pragma once

#include <cstdint>

#include "heterps/activation.cuh"
#include "heterps/row_threads.cuh"
#include "heterps/run.cuh"

namespace heterps {

// act = activate(pre); a thread for each of the `runs` of act, of which a row has hidden / kRun<T>.
// 16-bit types.
template <typename T>
__global__ void ffn_activate_kernel(int64_t runs, int64_t hidden, Activation kind,
                                    const T* __restrict__ pre, T* __restrict__ act) {
  constexpr int N = kRun<T>;
  const int64_t run = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (run >= runs) return;
  const bool gated = kind == Activation::kSwiglu;
  const T* from = pre + N * run;
  if (gated) from += quotient(run, hidden / N) * hidden;
  float x[N], y[N], result[N];
  load_run(x, from, N, true);
  if (gated) load_run(y, from + hidden, N, true);
  for (int n = 0; n < N; ++n) result[n] = activated(kind, x[n], gated ? y[n] : 1.0f);
  store_run(act + N * run, result, N, true);
}

// From the gradient of act, which lies in `act`, that of pre; and act itself, in its place.
template <typename T>
__global__ void ffn_slope_kernel(int64_t runs, int64_t hidden, Activation kind,
                                 const T* __restrict__ pre, T* __restrict__ act,
                                 T* __restrict__ grad_pre) {
  constexpr int N = kRun<T>;
  const int64_t run = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (run >= runs) return;
  const bool gated = kind == Activation::kSwiglu;
  const int64_t at = N * run + (gated ? quotient(run, hidden / N) * hidden : 0);
  float grad[N], x[N], y[N], result[N], of_gate[N], of_value[N];
  load_run(grad, act + N * run, N, true);
  load_run(x, pre + at, N, true);
  if (gated) load_run(y, pre + at + hidden, N, true);
  for (int n = 0; n < N; ++n) {
    const float value = gated ? y[n] : 1.0f;
    result[n] = activated(kind, x[n], value);
    of_gate[n] = grad[n] * slope(kind, x[n], value);
    of_value[n] = grad[n] * x[n] * logistic(x[n]);
  }
  store_run(act + N * run, result, N, true);
  store_run(grad_pre + at, of_gate, N, true);
  if (gated) store_run(grad_pre + at + hidden, of_value, N, true);
}

}  // namespace heterps
