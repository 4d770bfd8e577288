#include "network.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "pace.h"

// Compiles a function for wider vectors too, and picks at load time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && \
    !defined(__SANITIZE_THREAD__)
#define HETERPS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HETERPS_CLONES
#endif

namespace heterps::scheduler {
namespace {

constexpr int kRows = 4, kLanes = 8, kColumns = 2 * kLanes;  // of a tile that stays in registers

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// y [rows, out] = x [rows, in] w [in, out] + bias, or + y where `add`.
HETERPS_CLONES void Multiply(const float* __restrict x, const float* __restrict w,
                             const float* __restrict bias, int rows, int in, int out, bool add,
                             float* __restrict y) {
  int full = out / kColumns * kColumns;
  for (int row = 0; row < rows; row += kRows) {
    int tall = std::min(kRows, rows - row);
    const float* x0 = x + static_cast<size_t>(row) * in;
    // Rows beyond the last repeat it: computed, never written.
    const float* x1 = x0 + (tall > 1 ? in : 0);
    const float* x2 = x1 + (tall > 2 ? in : 0);
    const float* x3 = x2 + (tall > 3 ? in : 0);
    for (int column = 0; column < full; column += kColumns) {
      Lanes a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
      const float* line = w + column;
      for (int i = 0; i < in; ++i, line += out) {
        Lanes w0 = *reinterpret_cast<const Lanes*>(line);
        Lanes w1 = *reinterpret_cast<const Lanes*>(line + kLanes);
        a0 += x0[i] * w0, a1 += x0[i] * w1;
        b0 += x1[i] * w0, b1 += x1[i] * w1;
        c0 += x2[i] * w0, c1 += x2[i] * w1;
        d0 += x3[i] * w0, d1 += x3[i] * w1;
      }
      Lanes sums[kRows][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
      for (int r = 0; r < tall; ++r) {
        float* into = y + static_cast<size_t>(row + r) * out + column;
        for (int half = 0; half < 2; ++half) {
          Lanes sum = sums[r][half];
          Lanes* at = reinterpret_cast<Lanes*>(into + half * kLanes);
          if (bias) sum += *reinterpret_cast<const Lanes*>(bias + column + half * kLanes);
          if (add) sum += *at;
          *at = sum;
        }
      }
    }
    for (int r = 0; r < tall; ++r) {
      const float* at = x0 + static_cast<size_t>(r) * in;
      float* into = y + static_cast<size_t>(row + r) * out;
      for (int column = full; column < out; ++column) {
        float sum = 0;
        for (int i = 0; i < in; ++i) sum += at[i] * w[static_cast<size_t>(i) * out + column];
        into[column] = sum + (bias ? bias[column] : 0.0F) + (add ? into[column] : 0.0F);
      }
    }
  }
}

void Apply(const Linear& linear, const float* x, int rows, float* y, bool add = false) {
  Multiply(x, linear.weight.data(), linear.bias.empty() ? nullptr : linear.bias.data(), rows,
           linear.in, linear.out, add, y);
}

// exp for x <= 0, to about 2 ulp: 2^n times a polynomial, in plain arithmetic that vectorises.
HETERPS_CLONES void Exp(float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value = std::max(x[i], -87.0F) * 1.44269504F;
    float whole = static_cast<float>(static_cast<int32_t>(value - 0.5F));
    float f = (value - whole) * 0.69314718F;
    float sum =
        1.0F +
        f * (1.0F + f * (0.5F + f * (0.16666667F +
                                     f * (0.041666668F + f * (0.008333334F + f * 0.0013888889F)))));
    int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    x[i] = sum * scale;
  }
}

HETERPS_CLONES void Normalise(const Norm& norm, const float* x, int rows, int width, float* y) {
  for (int row = 0; row < rows; ++row) {
    const float* in = x + static_cast<size_t>(row) * width;
    float* out = y + static_cast<size_t>(row) * width;
    float mean = 0, square = 0;
    for (int i = 0; i < width; ++i) mean += in[i];
    mean /= static_cast<float>(width);
    for (int i = 0; i < width; ++i) square += (in[i] - mean) * (in[i] - mean);
    float scale = 1.0F / std::sqrt(square / static_cast<float>(width) + 1e-5F);
    for (int i = 0; i < width; ++i) {
      out[i] = (in[i] - mean) * scale * norm.weight[i] + norm.bias[i];
    }
  }
}

void Relu(std::vector<float>* x) {
  for (float& value : *x) value = std::max(value, 0.0F);
}

// Reads weights by name; says which is missing.
class Reader {
 public:
  explicit Reader(const Weights& weights) : weights_(weights) {}

  const Tensor& Get(const std::string& name) const {
    auto found = weights_.find(name);
    if (found == weights_.end()) throw std::invalid_argument("policy: no weight " + name);
    return found->second;
  }

  Linear ReadLinear(const std::string& name, bool bias = true) const {
    const Tensor& w = Get(name + ".weight");
    if (w.shape.size() != 2) throw std::invalid_argument("policy: " + name + " is no matrix");
    Linear linear;
    linear.out = static_cast<int>(w.shape[0]);
    linear.in = static_cast<int>(w.shape[1]);
    linear.weight.resize(w.values.size());
    for (int o = 0; o < linear.out; ++o) {
      for (int i = 0; i < linear.in; ++i) {
        linear.weight[static_cast<size_t>(i) * linear.out + o] =
            w.values[static_cast<size_t>(o) * linear.in + i];
      }
    }
    if (bias) linear.bias = Get(name + ".bias").values;
    if (bias && linear.bias.size() != w.shape[0]) {
      throw std::invalid_argument("policy: " + name + ".bias has the wrong size");
    }
    return linear;
  }

  Norm ReadNorm(const std::string& name, int width) const {
    Norm norm{Get(name + ".weight").values, Get(name + ".bias").values};
    if (norm.weight.size() != static_cast<size_t>(width) || norm.bias.size() != norm.weight.size())
      throw std::invalid_argument("policy: " + name + " has the wrong size");
    return norm;
  }

 private:
  const Weights& weights_;
};

void Expect(const Linear& linear, int in, int out, const char* name) {
  if (linear.in != in || linear.out != out) {
    throw std::invalid_argument(std::string("policy: ") + name + " has the wrong shape");
  }
}

}  // namespace

Network::Network(const Weights& weights, std::vector<int> distances, int heads, int blocks)
    : heads_(heads), distances_(std::move(distances)) {
  Reader read(weights);
  enter_ = read.ReadLinear("enter");
  width_ = enter_.out;
  if (heads < 1 || width_ % heads) throw std::invalid_argument("policy: heads must divide width");
  buckets_ = 2 * static_cast<int>(distances_.size()) + 1;
  Expect(enter_, kStatic, width_, "enter");
  norm_ = read.ReadNorm("norm", width_);
  encoded_ = read.ReadLinear("encoded");
  Expect(encoded_, width_, width_, "encoded");
  state_ = read.ReadLinear("state", false);
  Expect(state_, kDynamic, width_, "state");
  own_ = read.ReadLinear("own");
  Expect(own_, width_, width_, "own");
  others_ = read.ReadLinear("others", false);
  Expect(others_, 2 * width_, width_, "others");
  score_ = read.ReadLinear("score");
  Expect(score_, width_, 1, "score");
  judge_ = read.ReadLinear("judge");
  Expect(judge_, width_, width_, "judge");
  value_ = read.ReadLinear("value");
  Expect(value_, width_, 1, "value");
  for (int n = 0; n < blocks; ++n) {
    std::string name = "blocks." + std::to_string(n);
    Block block;
    for (auto [part, into] : {std::pair{".layers", &block.layers}, {".types", &block.types}}) {
      into->norm = read.ReadNorm(name + part + ".norm", width_);
      into->mix = read.ReadLinear(name + part + ".mix");
      Expect(into->mix, width_, 3 * width_, "mix");
      into->out = read.ReadLinear(name + part + ".out");
      Expect(into->out, width_, width_, "out");
    }
    block.distance = read.Get(name + ".distance").values;
    if (block.distance.size() != static_cast<size_t>(heads_) * buckets_) {
      throw std::invalid_argument("policy: distance has the wrong size");
    }
    block.norm = read.ReadNorm(name + ".norm", width_);
    block.up = read.ReadLinear(name + ".up");
    Expect(block.up, width_, block.up.out, "up");
    block.down = read.ReadLinear(name + ".down");
    Expect(block.down, block.up.out, width_, "down");
    blocks_.push_back(std::move(block));
  }
}

int Network::Bucket(int ahead) const {
  int size = static_cast<int>(
      std::upper_bound(distances_.begin(), distances_.end(), std::abs(ahead)) - distances_.begin());
  return ahead < 0 ? size + static_cast<int>(distances_.size()) : size;
}

void Network::Attend(const Attention& attention, float* x, int count, int length,
                     const std::vector<float>* distance, const int* bucket) const {
  int rows = count * length, size = width_ / heads_, wide = 3 * width_;
  std::vector<float> normed(static_cast<size_t>(rows) * width_);
  std::vector<float> mixed(static_cast<size_t>(rows) * wide);
  Normalise(attention.norm, x, rows, width_, normed.data());
  Apply(attention.mix, normed.data(), rows, mixed.data());
  std::vector<float> keys(static_cast<size_t>(size) * length), values(keys.size());
  std::vector<float> queries(keys.size()), scores(static_cast<size_t>(length) * length);
  std::vector<float> seen(keys.size());
  float scale = 1.0F / std::sqrt(static_cast<float>(size));
  for (int n = 0; n < count; ++n) {
    const float* rows_of = &mixed[static_cast<size_t>(n) * length * wide];
    for (int head = 0; head < heads_; ++head) {
      for (int s = 0; s < length; ++s) {
        const float* row = rows_of + static_cast<size_t>(s) * wide + head * size;
        for (int i = 0; i < size; ++i) {
          queries[static_cast<size_t>(s) * size + i] = row[i] * scale;
          keys[static_cast<size_t>(i) * length + s] = row[width_ + i];
          values[static_cast<size_t>(s) * size + i] = row[2 * width_ + i];
        }
      }
      Multiply(queries.data(), keys.data(), nullptr, length, size, length, false, scores.data());
      for (int s = 0; s < length; ++s) {
        float* row = &scores[static_cast<size_t>(s) * length];
        if (bucket) {
          const float* bias = &(*distance)[static_cast<size_t>(head) * buckets_];
          for (int o = 0; o < length; ++o) row[o] += bias[bucket[s * length + o]];
        }
        float most = *std::max_element(row, row + length);
        for (int o = 0; o < length; ++o) row[o] -= most;
      }
      Exp(scores.data(), scores.size());
      Multiply(scores.data(), values.data(), nullptr, length, length, size, false, seen.data());
      for (int s = 0; s < length; ++s) {
        float sum = 0;
        for (int o = 0; o < length; ++o) sum += scores[static_cast<size_t>(s) * length + o];
        float* into = &normed[(static_cast<size_t>(n) * length + s) * width_ + head * size];
        for (int i = 0; i < size; ++i) into[i] = seen[static_cast<size_t>(s) * size + i] / sum;
      }
    }
  }
  Apply(attention.out, normed.data(), rows, mixed.data());
  for (size_t i = 0; i < static_cast<size_t>(rows) * width_; ++i) x[i] += mixed[i];
}

std::vector<float> Network::Encode(const float* features, int layers, int types) const {
  size_t rows = static_cast<size_t>(layers) * types, size = rows * width_;
  std::vector<float> x(size), turned(size), normed(size);
  std::vector<int> bucket(static_cast<size_t>(layers) * layers);
  for (int a = 0; a < layers; ++a) {
    for (int b = 0; b < layers; ++b) bucket[static_cast<size_t>(a) * layers + b] = Bucket(b - a);
  }
  Apply(enter_, features, static_cast<int>(rows), x.data());
  for (const Block& block : blocks_) {
    // Along the layers of each type: [types, layers, width].
    for (int l = 0; l < layers; ++l) {
      for (int t = 0; t < types; ++t) {
        std::copy_n(&x[(static_cast<size_t>(l) * types + t) * width_], width_,
                    &turned[(static_cast<size_t>(t) * layers + l) * width_]);
      }
    }
    Attend(block.layers, turned.data(), types, layers, &block.distance, bucket.data());
    for (int l = 0; l < layers; ++l) {
      for (int t = 0; t < types; ++t) {
        std::copy_n(&turned[(static_cast<size_t>(t) * layers + l) * width_], width_,
                    &x[(static_cast<size_t>(l) * types + t) * width_]);
      }
    }
    Attend(block.types, x.data(), layers, types, nullptr, nullptr);
    std::vector<float> hidden(rows * block.up.out);
    Normalise(block.norm, x.data(), static_cast<int>(rows), width_, normed.data());
    Apply(block.up, normed.data(), static_cast<int>(rows), hidden.data());
    Relu(&hidden);
    Apply(block.down, hidden.data(), static_cast<int>(rows), turned.data());
    for (size_t i = 0; i < size; ++i) x[i] += turned[i];
  }
  Normalise(norm_, x.data(), static_cast<int>(rows), width_, normed.data());
  Apply(encoded_, normed.data(), static_cast<int>(rows), x.data());
  return x;
}

float Network::Score(const float* encoded, const float* state, const unsigned char* mask, int types,
                     float* logits) const {
  size_t size = static_cast<size_t>(types) * width_;
  std::vector<float> z(encoded, encoded + size), y(size);
  Apply(state_, state, types, z.data(), true);
  std::vector<float> context(2 * static_cast<size_t>(width_), 0.0F), shared(width_);
  float count = 0;
  for (int t = 0; t < types; ++t) {
    float* row = &z[static_cast<size_t>(t) * width_];
    float there = mask[t] ? 1.0F : 0.0F;
    count += there;
    for (int i = 0; i < width_; ++i) {
      row[i] = std::max(row[i], 0.0F);
      context[i] += row[i] * there;
      context[width_ + i] = std::max(context[width_ + i], row[i] * there);
    }
  }
  count = std::max(count, 1.0F);
  for (int i = 0; i < width_; ++i) context[i] /= count;
  Apply(others_, context.data(), 1, shared.data());
  for (int t = 0; t < types; ++t) {
    std::copy(shared.begin(), shared.end(), &y[static_cast<size_t>(t) * width_]);
  }
  Apply(own_, z.data(), types, y.data(), true);
  Relu(&y);
  Apply(score_, y.data(), types, logits);
  std::fill(shared.begin(), shared.end(), 0.0F);
  for (int t = 0; t < types; ++t) {
    if (!mask[t]) {
      logits[t] = -1e9F;
      continue;
    }
    for (int i = 0; i < width_; ++i) shared[i] += y[static_cast<size_t>(t) * width_ + i] / count;
  }
  std::vector<float> judged(width_);
  Apply(judge_, shared.data(), 1, judged.data());
  Relu(&judged);
  float value = 0;
  Apply(value_, judged.data(), 1, &value);
  return value;
}

}  // namespace heterps::scheduler
