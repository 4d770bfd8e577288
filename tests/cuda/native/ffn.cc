// grouped_ffn, and a router's products, on arrays that end where their memory does, compared with
// loops in double. To be built with a sanitizer, for one instruction set: the portable one is what
// no machine that has another chooses by itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.h"
#include "heterps/grouped_ffn.h"
#include "heterps/linear.h"

namespace {

using namespace heterps;

template <typename T>
double number(T value) {
  return static_cast<double>(static_cast<Sum<T>>(value));
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

// {activation, its derivative}
std::pair<double, double> activated(Activation kind, double x) {
  const double below = 0.5 * std::erfc(-x * std::sqrt(0.5));
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * std::acos(-1.0));
  const double gate = logistic(x);
  switch (kind) {
    case Activation::kGelu:
      return {x * below, below + x * density};
    case Activation::kRelu:
      return {std::max(x, 0.0), x > 0};
    default:
      return {x * gate, gate * (1 + x * (1 - gate))};
  }
}

template <typename T>
void near(const std::vector<T>& got, const std::vector<double>& wanted, double tolerance,
          const char* what) {
  double most = 1;
  for (double value : wanted) most = std::max(most, std::fabs(value));
  for (size_t i = 0; i < got.size(); ++i) {
    expect(std::fabs(number(got[i]) - wanted[i]) <= tolerance * most, what);
  }
}

template <typename T>
void ffn(DType dtype, Activation kind, const std::vector<int64_t>& counts, int64_t dim,
         int64_t hidden, double tolerance) {
  const auto offsets = offsets_of(counts);
  const int64_t rows = offsets.back(), groups = static_cast<int64_t>(counts.size());
  const FfnShape shape{rows, groups, dim, hidden, kind};
  const int64_t inner = shape.inner();
  const auto x = random<T>(rows * dim), grad = random<T>(rows * dim);
  const auto w1 = random<T>(groups * dim * inner, 1 / std::sqrt(dim));
  const auto w2 = random<T>(groups * hidden * dim, 1 / std::sqrt(hidden));
  std::vector<T> pre(rows * inner), act(rows * hidden), out(rows * dim), kept(rows * dim);
  const FfnArrays arrays{x.data(),   offsets.data(), w1.data(),  w2.data(),
                         pre.data(), act.data(),     kept.data()};
  FfnArrays lean = arrays;
  lean.pre = lean.act = nullptr, lean.out = out.data();
  grouped_ffn_cpu(shape, dtype, lean, 3);
  grouped_ffn_cpu(shape, dtype, arrays, 1);
  std::vector<T> grad_pre(rows * inner), grad_rows(rows * dim), grad_w1(w1.size()),
      grad_w2(w2.size());
  grouped_ffn_backward_cpu(
      shape, dtype, arrays,
      {grad.data(), grad_pre.data(), grad_rows.data(), grad_w1.data(), grad_w2.data()}, 1);

  std::vector<double> y(rows * dim, 0.0), dx(rows * dim, 0.0), dw1(w1.size(), 0.0),
      dw2(w2.size(), 0.0);
  for (int64_t e = 0; e < groups; ++e) {
    const T* a = w1.data() + e * dim * inner;
    const T* b = w2.data() + e * hidden * dim;
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      std::vector<double> u(inner, 0.0), du(inner, 0.0);
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t h = 0; h < inner; ++h)
          u[h] += number(x[r * dim + d]) * number(a[d * inner + h]);
      }
      for (int64_t h = 0; h < hidden; ++h) {
        const auto [value, slope] = activated(kind, u[h]);
        const double up = inner > hidden ? u[hidden + h] : 1.0;
        double back = 0;
        for (int64_t d = 0; d < dim; ++d) {
          y[r * dim + d] += value * up * number(b[h * dim + d]);
          back += number(grad[r * dim + d]) * number(b[h * dim + d]);
          dw2[(e * hidden + h) * dim + d] += value * up * number(grad[r * dim + d]);
        }
        du[h] = back * slope * up;
        if (inner > hidden) du[hidden + h] = back * value;
      }
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t h = 0; h < inner; ++h) {
          dx[r * dim + d] += du[h] * number(a[d * inner + h]);
          dw1[(e * dim + d) * inner + h] += du[h] * number(x[r * dim + d]);
        }
      }
    }
  }
  near(out, y, tolerance, "grouped_ffn: out");
  near(kept, y, tolerance, "grouped_ffn: out beside what backward needs");
  near(grad_rows, dx, tolerance, "grouped_ffn: the gradient of rows");
  near(grad_w1, dw1, tolerance, "grouped_ffn: the gradient of w1");
  near(grad_w2, dw2, tolerance, "grouped_ffn: the gradient of w2");
}

template <typename T>
void all_of(DType dtype, double tolerance) {
  using enum Activation;
  for (Activation kind : {kGelu, kRelu, kSilu, kSwiglu}) {
    ffn<T>(dtype, kind, {3, 0, 21}, 7, 13, tolerance);
  }
  ffn<T>(dtype, kRelu, {0}, 3, 5, tolerance);
  // Few rows and many, widths around those of panels and squares, and deeper than a panel.
  for (int64_t width : {1, 4, 8, 12, 16, 20, 33}) {
    ffn<T>(dtype, kSilu, {17, 2}, width, 8, tolerance);
    ffn<T>(dtype, kSilu, {17, 2}, 8, width, tolerance);
  }
  ffn<T>(dtype, kRelu, {40}, 264, 12, tolerance);
  // Rows up to which weights are read where they lie, and one more.
  ffn<T>(dtype, kSwiglu, {64, 65, 13, 1}, 264, 40, tolerance);
  // Wide enough to be cut by columns.
  ffn<T>(dtype, kSwiglu, {20, 3}, 150, 100, tolerance);
  ffn<T>(dtype, kRelu, {5, 270}, 12, 24, tolerance);
}

// With `between` as a layer between two ReLUs is.
void linear(int64_t tokens, int64_t dim, int64_t experts, int threads, bool between) {
  const auto x = random<float>(tokens * dim), w = random<float>(experts * dim);
  const auto bias = random<float>(experts), grad = random<float>(tokens * experts);
  std::vector<float> logits(tokens * experts), of_x(tokens * dim, 1), of_w(experts * dim);
  const LinearShape shape{tokens, dim, experts};
  linear_forward_cpu(shape, x.data(), w.data(), bias.data(), between, logits.data(), threads);
  linear_grad_input_cpu(shape, grad.data(), w.data(), between ? x.data() : nullptr, of_x.data(),
                        !between, threads);
  linear_grad_weight_cpu(shape, grad.data(), x.data(), of_w.data(), threads);
  std::vector<double> out(tokens * experts), to_x(tokens * dim, between ? 0 : 1);
  std::vector<double> to_w(experts * dim, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      double& sum = out[t * experts + e];
      sum = bias[e];
      const double g = grad[t * experts + e];
      for (int64_t d = 0; d < dim; ++d) {
        sum += static_cast<double>(x[t * dim + d]) * w[e * dim + d];
        if (!between || x[t * dim + d] > 0) to_x[t * dim + d] += g * w[e * dim + d];
        to_w[e * dim + d] += g * x[t * dim + d];
      }
      if (between && sum < 0) sum = 0;
    }
  }
  near(logits, out, 1e-5, "logits");
  near(of_x, to_x, 1e-5, "the gradient of rows");
  near(of_w, to_w, 1e-5, "the gradient of a weight");
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const int64_t tokens : {0, 1, 15, 16, 50, 401}) {
      for (const int64_t dim : {1, 33, 300}) {
        for (const int64_t experts : {1, 7, 40}) {
          for (const bool between : {false, true}) linear(tokens, dim, experts, threads, between);
        }
      }
    }
    // Packed: all rows at once, some at a time, and so for the gradient of the weight.
    linear(128, 257, 129, threads, true);
    linear(519, 128, 130, threads, false);
    linear(140, 131, 514, threads, true);
  }
  all_of<double>(DType::kFloat64, 1e-12);
  all_of<float>(DType::kFloat32, 1e-5);
  all_of<Float16>(DType::kFloat16, 1e-2);
  all_of<BFloat16>(DType::kBFloat16, 6e-2);
  return 0;
}
