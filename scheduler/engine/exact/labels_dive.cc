// The beam search of SharedLimits.
#include <algorithm>

#include "exact/labels.h"

namespace heterps::scheduler {
namespace {

constexpr size_t kEnds = 4;  // plans of a beam that are tried

struct Label {
  double bound, price, weighted;  // weighted: with the multipliers
  int32_t parent, at;
  int16_t type;
  bool hit;
  int32_t units;
  double bytes;  // of its last stage
  bool operator<(const Label& other) const { return bound < other.bound; }
};

// The best labels at one boundary.
class Beam {
 public:
  void Offer(const Label& label, size_t width) {
    if (label.bound >= bar_) return;
    labels_.push_back(label);
    if (labels_.size() >= 4 * width) Trim(width);
  }
  std::vector<Label>& Trim(size_t width) {
    if (labels_.size() > width) {
      std::nth_element(labels_.begin(), labels_.begin() + width - 1, labels_.end());
      labels_.resize(width);
      bar_ = labels_.back().bound;
    }
    return labels_;
  }

 private:
  std::vector<Label> labels_;
  double bar_ = kInf;
};

}  // namespace

void SharedLimits::Dive(const std::vector<double>& multipliers, const Rests& rests, Effort effort,
                        const Visit& visit, Answer* answer) const {
  const int layers = problem_.layers;
  const size_t types = problem_.types;
  const std::vector<double> weight = Weights(multipliers);
  const double constant = Constant(multipliers);
  std::vector<Label> kept;   // of all boundaries passed
  std::vector<double> used;  // units of each type, [kept, types]
  std::vector<Beam> beams(layers + 1);
  beams[0].Offer({0, 0, 0, -1, 0, -1, !must_hit_, 0, 0}, effort.width);
  const double best = std::min(answer->price, most_);
  for (int first = 0; first < layers; ++first) {
    for (const Label& from : beams[first].Trim(effort.width)) {
      int32_t n = static_cast<int32_t>(kept.size());
      kept.push_back(from);
      used.resize(used.size() + types, 0.0);
      double* mine = &used[n * types];
      if (from.parent >= 0) {
        std::copy_n(&used[from.parent * types], types, mine);
        mine[from.type] += from.units;
      }
      for (int32_t m = graph_.begin[first]; m < graph_.begin[first + 1]; ++m) {
        const Arc& arc = graph_.arcs[m];
        if (!MayFollow(m, from.type, from.bytes)) continue;
        Label next{0,
                   from.price + price_[arc.type] * arc.units,
                   0,
                   n,
                   arc.to,
                   arc.type,
                   from.hit || arc.hit,
                   arc.units,
                   graph_.Bytes(m)};
        next.weighted = from.weighted + weight[arc.type] * arc.units;
        auto rest = [&](const Rest& costs) {
          return costs.At(next.hit).Cost(next.at, next.type, next.bytes);
        };
        next.bound = next.weighted + rest(rests.guided) - constant;
        if (!(next.bound < best)) continue;
        bool within = mine[arc.type] + arc.units <= target_.room[arc.type];
        for (size_t d = 0; d < rests.tight.size() && within; ++d) {
          int type = rests.tight[d];
          double units = mine[type] + (type == arc.type ? arc.units : 0);
          within = units + rest(rests.fewest[d]) <= target_.room[type];
        }
        if (within) beams[arc.to].Offer(next, effort.width);
      }
    }
  }
  for (const Label& end : beams[layers].Trim(kEnds)) {
    std::vector<int32_t> assignment(layers);
    for (const Label* label = &end; label->parent >= 0; label = &kept[label->parent]) {
      int code = Code(label->type, label->at < layers ? assignment[label->at] : -1, problem_.types);
      std::fill(assignment.begin() + kept[label->parent].at, assignment.begin() + label->at, code);
    }
    visit(assignment);
    if (end.price < std::min(answer->price, most_)) {
      answer->price = end.price;
      answer->assignment = std::move(assignment);
    }
  }
}

}  // namespace heterps::scheduler
