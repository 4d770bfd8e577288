// The policy's network, forward only: scheduler/agent/training/network.py in float32 without torch.
//
// The encoder runs once a problem and pace, the head once a layer of an episode. Sums run in one
// fixed order and without fused multiply-add, so that a plan is the same on every CPU.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace heterps::scheduler {

struct Linear {
  int in = 0, out = 0;
  std::vector<float> weight;  // [in, out]
  std::vector<float> bias;    // [out]
};

struct Norm {
  std::vector<float> weight, bias;
};

// Weights as torch names and lays them out: a matrix is [out, in].
struct Tensor {
  std::vector<size_t> shape;
  std::vector<float> values;
};
using Weights = std::map<std::string, Tensor>;

class Network {
 public:
  Network(const Weights& weights, std::vector<int> distances, int heads, int blocks);

  int width() const { return width_; }

  // features [layers, types, kLayerFeatures] of one pace -> encoding [layers, types, width].
  std::vector<float> Encode(const float* features, int layers, int types) const;

  // Scores the types of one layer: encoded [types, width], state [types, kStateFeatures], mask
  // [types]. Writes logits [types], -1e9 where masked, and the value unless that is null. What
  // stands for masked types in `encoded` and `state` has no influence.
  void Score(const float* encoded, const float* state, const unsigned char* mask, int types,
             float* logits, float* value) const;

 private:
  struct Attention {
    Norm norm;
    Linear mix, out;
  };
  struct Block {
    Attention layers, types;
    std::vector<float> distance;  // [heads, buckets]
    Norm norm;
    Linear up, down;
  };

  // Adds to x [count, length, width] what it attends to within its `length`; `bucket`
  // [length, length] picks a bias from `distance`, or is null.
  void Attend(const Attention& attention, float* x, int count, int length,
              const std::vector<float>* distance, const int* bucket) const;
  int Bucket(int ahead) const;

  int width_ = 0, heads_, buckets_ = 0;
  std::vector<int> distances_;
  Linear enter_, encoded_, state_, own_, others_, score_, judge_, value_;
  Norm norm_;
  std::vector<Block> blocks_;
};

}  // namespace heterps::scheduler
