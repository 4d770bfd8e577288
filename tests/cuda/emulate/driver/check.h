// What the drivers share: arrays that are poison until written and end where their memory does, and
// comparisons in which NaN equals NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "heterps/dtype.h"
#include "heterps/half.h"

namespace heterps {

extern std::mt19937_64 chance;

inline int64_t below(int64_t n) { return static_cast<int64_t>(chance() % n); }
inline bool maybe(int64_t one_in) { return below(one_in) == 0; }
inline int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[below(static_cast<int64_t>(values.size()))];
}

// `shift` elements off the alignment. Its margins are checked, or watched by a sanitizer.
template <typename T>
class Array {
 public:
#ifdef __SANITIZE_ADDRESS__
  static constexpr int64_t kMargin = 0;
#else
  static constexpr int64_t kMargin = 64;
#endif

  explicit Array(int64_t size, int64_t shift = 0)
      : size_(size),
        begin_(kMargin + shift),
        memory_(static_cast<T*>(std::malloc(std::max<size_t>(1, whole() * sizeof(T)))),
                &std::free) {
    std::memset(static_cast<void*>(memory_.get()), kPoison, whole() * sizeof(T));
  }
  Array(const Array& other) : Array(other.size_, other.begin_ - kMargin) {
    std::copy_n(other.data(), size_, data());
  }

  T* data() { return memory_.get() + begin_; }
  const T* data() const { return memory_.get() + begin_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }

  void check(const std::string& what) const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory_.get());
    const int64_t from = begin_ * sizeof(T), to = from + size_ * sizeof(T);
    for (int64_t i = 0; i < whole() * static_cast<int64_t>(sizeof(T)); ++i) {
      if ((i < from || i >= to) && bytes[i] != kPoison) {
        throw std::runtime_error(what + ": written beside the array");
      }
    }
  }

 private:
  static constexpr unsigned char kPoison = 0xa5;
  int64_t whole() const { return begin_ + size_ + kMargin; }

  int64_t size_;
  int64_t begin_;
  std::unique_ptr<T, decltype(&std::free)> memory_;
};

template <typename T>
double number(T value) {
  if constexpr (std::is_integral_v<T>) return static_cast<double>(value);
  return static_cast<double>(static_cast<Sum<T>>(value));
}

template <typename T>
Array<T> normal(int64_t size, double scale = 1.0, int64_t shift = 0) {
  std::normal_distribution<double> normal(0.0, scale);
  Array<T> values(size, shift);
  for (T& value : values) value = static_cast<T>(static_cast<Sum<T>>(normal(chance)));
  return values;
}

// Numbers of integers below `n`; a hot one most of the time, at times.
inline Array<int64_t> indices(int64_t size, int64_t n) {
  Array<int64_t> values(size);
  const int64_t hot = below(n), share = one_of({1, 2, 1000000});
  for (int64_t& value : values) value = below(share) == 0 ? below(n) : hot;
  return values;
}

// |got - wanted| <= tolerance * max(1, greatest |wanted| of the array); 0: equal.
template <typename T>
void same(const Array<T>& got, const Array<T>& wanted, double tolerance, const std::string& what) {
  got.check(what);
  double greatest = 1.0;
  for (int64_t i = 0; i < wanted.size(); ++i) {
    const double size = std::fabs(number(wanted[i]));
    if (std::isfinite(size)) greatest = std::max(greatest, size);
  }
  for (int64_t i = 0; i < wanted.size(); ++i) {
    const double a = number(got[i]), b = number(wanted[i]);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    if (std::fabs(a - b) <= tolerance * greatest) continue;
    throw std::runtime_error(what + ": element " + std::to_string(i) + " of " +
                             std::to_string(wanted.size()) + " is " + std::to_string(a) +
                             ", expected " + std::to_string(b));
  }
}

// What an array holds, which nobody but a kernel may see until it is restored.
class Hidden {
 public:
  template <typename T>
  explicit Hidden(const Array<T>& array)
      : at_(const_cast<T*>(array.data())), kept_(array.size() * sizeof(T)) {
    if (kept_.empty()) return;
    std::memcpy(kept_.data(), at_, kept_.size());
    std::memset(at_, 0xa5, kept_.size());
  }
  void restore() const {
    if (!kept_.empty()) std::memcpy(at_, kept_.data(), kept_.size());
  }

 private:
  void* at_;
  std::vector<char> kept_;
};

// Calls `work`, which enqueues kernels. At times as CUDA graphs are made: it is captured before the
// arrays that the kernels read hold what they do when it is replayed.
template <typename Work, typename... T>
void enqueued(const Work& work, const Array<T>&... read) {
  if (maybe(2)) return work();
  const Hidden hidden[] = {Hidden(read)...};
  emulate::begin_capture();
  try {
    work();
  } catch (...) {
    emulate::end_capture();
    throw;
  }
  const auto graph = emulate::end_capture();
  for (const Hidden& each : hidden) each.restore();
  for (const auto& step : graph) step();
  if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("a graph that cannot be run");
}

// Calls `work` with a null pointer of each element type, its DType and a tolerance.
template <typename Work>
void each_dtype(const Work& work) {
  work(static_cast<float*>(nullptr), DType::kFloat32, 1e-5);
  work(static_cast<double*>(nullptr), DType::kFloat64, 1e-12);
  work(static_cast<Float16*>(nullptr), DType::kFloat16, 1e-2);
  work(static_cast<BFloat16*>(nullptr), DType::kBFloat16, 6e-2);
}

// One round of each op, on cases of chance.
void fuzz_machine();
void fuzz_route();
void fuzz_gather();
void fuzz_embedding();
void fuzz_quantize();
void fuzz_row_cache();
void fuzz_grouped_ffn();

}  // namespace heterps
