// The label-setting search of SharedLimits, best bound first.
#include <queue>

#include "exact/labels.h"

namespace heterps::scheduler {
namespace {

struct Label {
  double price, weighted;  // of its arcs, without and with the multipliers
  double bytes;            // of its last stage
  int32_t parent, arc, at;
  int16_t type;
  bool hit;
};

struct Open {
  double bound;
  int32_t at, label;
  bool operator<(const Open& other) const {  // the last of std::priority_queue is popped first
    return bound != other.bound ? bound > other.bound : at < other.at;
  }
};

// Labels with what they use of the tight types, one row each.
class Labels {
 public:
  explicit Labels(size_t width) : width_(width) {}
  size_t size() const { return labels_.size(); }
  const Label& operator[](int32_t n) const { return labels_[n]; }
  const int32_t* used(int32_t n) const { return used_.data() + n * width_; }

  int32_t Add(const Label& label, const std::vector<int32_t>& used) {
    labels_.push_back(label);
    used_.insert(used_.end(), used.begin(), used.end());
    return static_cast<int32_t>(labels_.size() - 1);
  }
  bool Dominates(int32_t n, const Label& label, const std::vector<int32_t>& used) const {
    if (labels_[n].price > label.price * (1 + 1e-14)) return false;
    // More stages may follow on its type where it takes more memory.
    if (labels_[n].bytes < label.bytes) return false;
    const int32_t* mine = this->used(n);
    for (size_t d = 0; d < width_; ++d) {
      if (mine[d] > used[d]) return false;
    }
    return true;
  }

 private:
  size_t width_;
  std::vector<Label> labels_;
  std::vector<int32_t> used_;
};

}  // namespace

void SharedLimits::Search(const std::vector<double>& multipliers, const Rests& rests, Effort effort,
                          Clock::time_point deadline, const Visit& visit, Answer* answer) const {
  const int layers = problem_.layers, types = problem_.types;
  const std::vector<int>& tight = rests.tight;
  std::vector<int> dimension(types, -1);
  for (size_t d = 0; d < tight.size(); ++d) dimension[tight[d]] = static_cast<int>(d);
  const std::vector<double> weight = Weights(multipliers);
  const double constant = Constant(multipliers);
  auto rest = [this](const Rest& costs, const Label& label) {
    return costs.At(label.hit).Cost(label.at, label.type, label.bytes);
  };

  Labels labels(tight.size());
  // [boundary, type, hit] -> labels there.
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(layers + 1) * types * 2);
  auto place = [&](int at, int type, bool hit) -> std::vector<int32_t>& {
    return places[(static_cast<size_t>(at) * types + type) * 2 + hit];
  };
  std::priority_queue<Open> open;
  Label start{0, 0, 0, -1, -1, 0, -1, !must_hit_};
  std::vector<int32_t> used(tight.size(), 0);
  open.push({answer->bound, 0, labels.Add(start, used)});
  std::vector<bool> dropped{false};
  double best = std::min(answer->price, most_), proven = kInf;
  int32_t end = -1;

  auto unwind = [&](int32_t label) {
    std::vector<int32_t> assignment(layers);
    for (; labels[label].parent >= 0; label = labels[label].parent) {
      int from = labels[labels[label].parent].at;
      int at = labels[label].at;
      int code = Code(labels[label].type, at < layers ? assignment[at] : -1, problem_.types);
      std::fill(assignment.begin() + from, assignment.begin() + at, code);
    }
    return assignment;
  };

  bool found_any = false;
  for (int64_t popped = 0; !open.empty() && !found_any; ++popped) {
    Open top = open.top();
    if (top.bound >= best * (1 - 1e-12)) break;
    bool late = (popped & 255) == 255 && Clock::now() > deadline;
    if (late || labels.size() > effort.most_labels) {
      proven = top.bound;
      break;
    }
    open.pop();
    if (dropped[top.label]) continue;
    const Label from = labels[top.label];
    for (int32_t n = graph_.begin[from.at]; n < graph_.begin[from.at + 1]; ++n) {
      const Arc& arc = graph_.arcs[n];
      if (!MayFollow(n, from.type, from.bytes)) continue;
      Label next{from.price + price_[arc.type] * arc.units,
                 from.weighted + weight[arc.type] * arc.units,
                 graph_.Bytes(n),
                 top.label,
                 n,
                 arc.to,
                 arc.type,
                 from.hit || arc.hit};
      double bound = std::max(next.weighted + rest(rests.guided, next) - constant,
                              next.price + rest(rests.plain, next));
      if (!(bound < best * (1 - 1e-12))) continue;
      used.assign(labels.used(top.label), labels.used(top.label) + tight.size());
      if (dimension[arc.type] >= 0) used[dimension[arc.type]] += arc.units;
      bool within = true;
      for (size_t d = 0; d < tight.size() && within; ++d) {
        within = used[d] + rest(rests.fewest[d], next) <= target_.room[tight[d]];
      }
      if (!within) continue;
      bool dominated = false;
      for (bool hit : {true, false}) {
        if (next.hit && !hit) continue;
        for (int32_t other : place(next.at, next.type, hit)) {
          if ((dominated = labels.Dominates(other, next, used))) break;
        }
        if (dominated) break;
      }
      if (dominated) continue;
      int32_t label = labels.Add(next, used);
      dropped.push_back(false);
      std::vector<int32_t>& here = place(next.at, next.type, next.hit);
      std::erase_if(here, [&](int32_t other) {
        const Label& old = labels[other];
        if (old.price < next.price || old.bytes > next.bytes) return false;
        for (size_t d = 0; d < tight.size(); ++d) {
          if (labels.used(other)[d] < used[d]) return false;
        }
        dropped[other] = true;
        return true;
      });
      here.push_back(label);
      if (next.at == layers) {
        best = next.price;
        end = label;
        visit(unwind(end));
        found_any = effort.any;
        if (found_any) break;
      } else {
        open.push({std::max(bound, top.bound), next.at, label});
      }
    }
  }
  if (end >= 0) {
    answer->price = best;
    answer->assignment = unwind(end);
  }
  if (found_any) return;
  answer->bound = std::max(answer->bound, std::min(proven, best));
  answer->exact = proven == kInf;
}

}  // namespace heterps::scheduler
