#include "policy/network.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "policy/pace.h"

// Compiles a function for wider vectors too, and picks at load time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && \
    !defined(__SANITIZE_THREAD__)
#define HETERPS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HETERPS_CLONES
#endif

namespace heterps::scheduler {
namespace {

constexpr int kLanes = 8;  // floats of a vector
constexpr int kSums = 8;   // vectors of sums that stay in registers: rows times columns of a tile
constexpr int kRows = 4;   // of the tallest tile

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

struct Matrices {
  const float* x;     // [rows, in]
  const float* w;     // [in, out]
  const float* bias;  // [out], or null
  int in, out;
  bool add;
  float* y;  // [rows, out]
};

// The sums of `Rows` rows from `row` on; low tiles are wide, so that sums do not wait for the last.
template <int Rows>
[[gnu::always_inline]] inline void Tile(const Matrices& m, int row) {
  constexpr int kWide = kSums / Rows;
  const float* x = m.x + static_cast<size_t>(row) * m.in;
  float* y = m.y + static_cast<size_t>(row) * m.out;
  int column = 0;
  auto sum = [&]<int Wide>(std::integral_constant<int, Wide>) __attribute__((always_inline)) {
    Lanes sums[Rows][Wide] = {};
    const float* line = m.w + column;
    for (int i = 0; i < m.in; ++i, line += m.out) {
      for (int c = 0; c < Wide; ++c) {
        Lanes w = *reinterpret_cast<const Lanes*>(line + c * kLanes);
        for (int r = 0; r < Rows; ++r) sums[r][c] += x[static_cast<size_t>(r) * m.in + i] * w;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Wide; ++c) {
        int to = column + c * kLanes;
        Lanes* at = reinterpret_cast<Lanes*>(y + static_cast<size_t>(r) * m.out + to);
        if (m.bias) sums[r][c] += *reinterpret_cast<const Lanes*>(m.bias + to);
        if (m.add) sums[r][c] += *at;
        *at = sums[r][c];
      }
    }
    column += Wide * kLanes;
  };
  while (column + kWide * kLanes <= m.out) sum(std::integral_constant<int, kWide>());
  while (column + kLanes <= m.out) sum(std::integral_constant<int, 1>());
  for (; column < m.out; ++column) {
    float sums[Rows] = {};
    for (int i = 0; i < m.in; ++i) {
      float w = m.w[static_cast<size_t>(i) * m.out + column];
      for (int r = 0; r < Rows; ++r) sums[r] += x[static_cast<size_t>(r) * m.in + i] * w;
    }
    for (int r = 0; r < Rows; ++r) {
      float& into = y[static_cast<size_t>(r) * m.out + column];
      into = sums[r] + (m.bias ? m.bias[column] : 0.0F) + (m.add ? into : 0.0F);
    }
  }
}

// y [rows, out] = x [rows, in] w [in, out] + bias, or + y where `add`.
HETERPS_CLONES void Multiply(const float* __restrict x, const float* __restrict w,
                             const float* __restrict bias, int rows, int in, int out, bool add,
                             float* __restrict y) {
  Matrices m{x, w, bias, in, out, add, y};
  int row = 0;
  for (; row + kRows <= rows; row += kRows) Tile<4>(m, row);
  if (rows - row == 3) Tile<3>(m, row);
  if (rows - row == 2) Tile<2>(m, row);
  if (rows - row == 1) Tile<1>(m, row);
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

void Relu(float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] = std::max(x[i], 0.0F);
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
  Expect(enter_, kLayerFeatures, width_, "enter");
  norm_ = read.ReadNorm("norm", width_);
  encoded_ = read.ReadLinear("encoded");
  Expect(encoded_, width_, width_, "encoded");
  state_ = read.ReadLinear("state", false);
  Expect(state_, kStateFeatures, width_, "state");
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
    Relu(hidden.data(), hidden.size());
    Apply(block.down, hidden.data(), static_cast<int>(rows), turned.data());
    for (size_t i = 0; i < size; ++i) x[i] += turned[i];
  }
  Normalise(norm_, x.data(), static_cast<int>(rows), width_, normed.data());
  Apply(encoded_, normed.data(), static_cast<int>(rows), x.data());
  return x;
}

void Network::Score(const float* encoded, const float* state, const unsigned char* mask, int types,
                    float* logits, float* value) const {
  // Only the open types count.
  size_t width = width_, size = width * types;
  // Kept between calls: there are very many, and each writes what it reads.
  thread_local std::vector<float> room;
  room.resize(std::max(room.size(), 2 * size + 4 * width + types * (kStateFeatures + size_t{1})));
  float* z = room.data();
  float *y = z + size, *context = y + size, *shared = context + 2 * width;
  float *judged = shared + width, *states = judged + width,
        *scores = states + types * kStateFeatures;
  int open = 0;
  for (int t = 0; t < types; ++t) {
    logits[t] = -1e9F;
    if (!mask[t]) continue;
    std::copy_n(encoded + t * width, width, z + open * width);
    std::copy_n(state + static_cast<size_t>(t) * kStateFeatures, kStateFeatures,
                states + open * kStateFeatures);
    ++open;
  }
  Apply(state_, states, open, z, true);
  Relu(z, open * width);
  float count = static_cast<float>(std::max(open, 1));
  std::fill_n(context, 2 * width, 0.0F);
  for (int t = 0; t < open; ++t) {
    const float* row = z + t * width;
    for (int i = 0; i < width_; ++i) {
      context[i] += row[i];
      context[width + i] = std::max(context[width + i], row[i]);
    }
  }
  for (int i = 0; i < width_; ++i) context[i] /= count;
  Apply(others_, context, 1, shared);
  for (int t = 0; t < open; ++t) std::copy_n(shared, width, y + t * width);
  Apply(own_, z, open, y, true);
  Relu(y, open * width);
  Apply(score_, y, open, scores);
  for (int t = 0, at = 0; t < types; ++t) {
    if (mask[t]) logits[t] = scores[at++];
  }
  if (!value) return;
  std::fill_n(shared, width, 0.0F);
  for (int t = 0; t < open; ++t) {
    for (int i = 0; i < width_; ++i) shared[i] += y[t * width + i] / count;
  }
  Apply(judge_, shared, 1, judged);
  Relu(judged, width);
  Apply(value_, judged, 1, value);
}

}  // namespace heterps::scheduler
