#include "exact/step_labels.h"

#include <cmath>

namespace heterps::scheduler {
namespace {

constexpr double kFine = 1.0 / 2048;    // of a step: labels this near to each other become one
constexpr double kWider = 1.3;          // times that they get wider where there are too many
constexpr size_t kCompared = 128;       // labels that each is compared with
constexpr double kRounding = 1 + 1e-9;  // of sums

uint64_t Hash(uint64_t cell) {
  cell *= 0x9e3779b97f4a7c15ull;
  return cell ^ (cell >> 29);
}

}  // namespace

StepLabels::StepLabels(const Problem& problem, const std::vector<Span>& spans, const Ahead& ahead,
                       size_t most)
    : problem_(problem), spans_(spans), ahead_(ahead), most_(most), ending_(problem.layers + 1) {
  for (size_t n = 0; n < spans.size(); ++n) {
    ending_[spans[n].last + 1].push_back(static_cast<int32_t>(n));
  }
}

double StepLabels::Bound(const Box& box, double least, const std::vector<Choice>& open,
                         const std::vector<size_t>& opened, const TripWays& ways, Chain* chain,
                         const std::function<bool()>& done) {
  open_ = &open, opened_ = &opened, ways_ = &ways;
  groups_.assign(static_cast<size_t>(problem_.layers + 1) * problem_.types, {});
  for (Group& group : groups_) group.width = box.step[1] * kFine;
  settled_.clear();
  std::fill(shared_, shared_ + kShared, -1);
  for (int type = 0, n = 0; type < problem_.types && n < kShared; ++type) {
    if (box.weight[type] > 0) shared_[n++] = type;
  }
  best_ = least;
  last_ = {};
  last_.span = -1;
  Label root{};
  root.parent = root.span = -1;
  here_.assign(1, root);
  settled_.push_back(root);
  Lengthen(problem_.layers, -1, box);
  for (int at = problem_.layers - 1; at > 0; --at) {
    for (int type = 0; type < problem_.types; ++type) {
      if (done()) return 0;
      Group& group = groups_[static_cast<size_t>(at) * problem_.types + type];
      if (group.labels.empty()) continue;
      Settle(&group);
      here_.swap(group.labels);
      Lengthen(at, type, box);
      group = {};
    }
  }
  *chain = {};
  for (Label label = last_; label.span >= 0; label = settled_[label.parent]) {
    chain->spans.push_back(label.span);
    chain->units.push_back(label.units);
  }
  return best_;
}

// Puts every stage before the labels of `here_`, which are at a boundary, by price.
void StepLabels::Lengthen(int at, int type, const Box& box) {
  size_t from = settled_.size() - here_.size();
  double end = box.step[1] * kRounding;
  for (int32_t n : ending_[at]) {
    const Span& span = spans_[n];
    if (span.type == type && !problem_.cuts) continue;
    int first = span.first;
    double soonest = ahead_.Before(first), forth = ahead_.forth[first];
    double before = ways_->Least(first);
    int mine = -1;
    for (int k = 0; k < kShared; ++k) {
      if (shared_[k] == span.type) mine = k;
    }
    Group& group = groups_[static_cast<size_t>(first) * problem_.types + span.type];
    for (size_t now = (*opened_)[n]; now < (*opened_)[n + 1]; ++now) {
      const Choice& choice = (*open_)[now];
      double bar = box.most - before - choice.price;
      for (size_t k = 0; k < here_.size() && here_[k].price < bar; ++k) {
        const Label& later = here_[k];
        if (mine >= 0 && later.used[mine] + choice.units > box.room[span.type]) continue;
        Label label;
        label.trip = later.trip + choice.trip;
        label.pipeline =
            std::max({choice.alone, label.trip + choice.again, later.pipeline + choice.trip});
        label.step = std::max(label.pipeline + choice.sum, choice.forth + later.step);
        label.counted[0] = later.counted[0] + choice.counted;
        label.counted[1] = later.counted[1] + choice.counted;
        double least = std::max(soonest, box.trip[0] - label.counted[1] * kRounding);
        double started = std::max(forth, ahead_.share * least);
        if (label.pipeline + least > end || label.step + started > end) continue;
        if (first == 0 && label.counted[1] * kRounding < box.trip[0]) continue;
        double room = std::min(end - label.pipeline, box.trip[1] * kRounding - label.counted[0]);
        if (ahead_.share > 0) room = std::min(room, (end - label.step) / ahead_.share);
        double owed = end - std::max(label.pipeline + least, box.trip[0]);
        label.price = later.price + choice.price;
        label.plain = later.plain + choice.units * problem_.price[span.type];
        double price = label.price + ways_->Least(first, room * kRounding, owed * kRounding,
                                                  span.type, problem_.cuts);
        if (price >= box.most) continue;
        double seconds = std::max({box.step[0], label.step + started, label.pipeline + least});
        double value = seconds * (price + box.outside) / kRounding;
        if (value >= best_) continue;
        label.returns = later.returns.Before(choice.stage, later.trip, problem_.micro_batches);
        double last = label.returns.Last();
        if (last > label.pipeline) {
          label.pipeline = last;
          label.step = std::max(label.step, last + choice.sum);
          if (last + least > end || label.step + started > end) continue;
          room = std::min(end - last, box.trip[1] * kRounding - label.counted[0]);
          if (ahead_.share > 0) room = std::min(room, (end - label.step) / ahead_.share);
          owed = end - std::max(last + least, box.trip[0]);
          price = label.price +
                  ways_->Least(first, room * kRounding, owed * kRounding, span.type, problem_.cuts);
          if (price >= box.most) continue;
          seconds = std::max({box.step[0], label.step + started, last + least});
          value = seconds * (price + box.outside) / kRounding;
          if (value >= best_) continue;
        }
        label.parent = static_cast<int32_t>(from + k);
        label.span = n;
        label.units = choice.units;
        std::copy(later.used, later.used + kShared, label.used);
        if (mine >= 0) label.used[mine] += choice.units;
        if (first == 0) {
          value = std::max(value, seconds * (label.plain + box.ps) / kRounding);
          if (value >= best_) continue;
          best_ = value;
          last_ = label;
        } else {
          Insert(&group, label);
        }
      }
    }
  }
}

void StepLabels::Insert(Group* group, const Label& label) {
  if (group->labels.size() >= 4 * most_) Coarsen(group);
  if (2 * (group->labels.size() + 1) > group->table.size()) {
    group->table.assign(std::max<size_t>(64, 4 * group->table.size()), -1);
    size_t mask = group->table.size() - 1;
    for (size_t n = 0; n < group->labels.size(); ++n) {
      size_t at = Hash(group->labels[n].cell) & mask;
      while (group->table[at] >= 0) at = (at + 1) & mask;
      group->table[at] = static_cast<int32_t>(n);
    }
  }
  auto part = [&](double seconds) { return static_cast<uint64_t>(seconds / group->width); };
  uint64_t cell = part(label.trip) << 42 | part(label.pipeline) << 21 | part(label.step);
  for (int n = 0; n < kShared; ++n) {
    cell = Hash(cell) + static_cast<uint64_t>(label.used[n] / group->grain);
  }
  size_t mask = group->table.size() - 1, at = Hash(cell) & mask;
  while (group->table[at] >= 0 && group->labels[group->table[at]].cell != cell) {
    at = (at + 1) & mask;
  }
  if (group->table[at] < 0) {
    group->table[at] = static_cast<int32_t>(group->labels.size());
    group->labels.push_back(label);
    group->labels.back().cell = cell;
    return;
  }
  Label& mine = group->labels[group->table[at]];
  if (label.price < mine.price) {
    mine.price = label.price;
    mine.parent = label.parent, mine.span = label.span, mine.units = label.units;
  }
  mine.plain = std::min(mine.plain, label.plain);
  mine.trip = std::min(mine.trip, label.trip);
  mine.pipeline = std::min(mine.pipeline, label.pipeline);
  mine.step = std::min(mine.step, label.step);
  Spread(label, &mine);
  for (int n = 0; n < kShared; ++n) mine.used[n] = std::min(mine.used[n], label.used[n]);
  for (int c = 0; c < StepReturns::kMost; ++c) {
    mine.returns.at[c] = std::min(mine.returns.at[c], label.returns.at[c]);
  }
}

// Has a label stand for the trips of another, too.
void StepLabels::Spread(const Label& from, Label* to) {
  to->counted[0] = std::min(to->counted[0], from.counted[0]);
  to->counted[1] = std::max(to->counted[1], from.counted[1]);
}

// Makes cells wider, so that about half as many are left.
void StepLabels::Coarsen(Group* group) {
  std::vector<Label> labels;
  labels.swap(group->labels);
  group->table.clear();
  group->width *= kWider;
  group->grain *= kWider;
  for (const Label& label : labels) Insert(group, label);
}

// Leaves the labels that are no worse than others, at most `most_`, by price.
void StepLabels::Settle(Group* group) {
  auto filter = [&] {
    std::vector<Label>& labels = group->labels;
    std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) {
      return a.price != b.price ? a.price < b.price : a.step < b.step;
    });
    size_t kept = 0;
    for (size_t n = 0; n < labels.size(); ++n) {
      const Label& label = labels[n];
      size_t first = kept > kCompared ? kept - kCompared : 0;
      bool worse = false;
      for (size_t k = first; k < kept && !worse; ++k) {
        Label& other = labels[k];
        worse = other.plain <= label.plain && other.trip <= label.trip &&
                other.pipeline <= label.pipeline && other.step <= label.step;
        for (int n = 0; worse && n < kShared; ++n) worse = other.used[n] <= label.used[n];
        for (int c = 0; worse && c < StepReturns::kMost; ++c) {
          worse = other.returns.at[c] <= label.returns.at[c];
        }
        if (worse) Spread(label, &other);
      }
      if (!worse) labels[kept++] = label;
    }
    labels.resize(kept);
    group->table.clear();
  };
  filter();
  while (group->labels.size() > most_) {
    Coarsen(group);
    filter();
  }
  settled_.insert(settled_.end(), group->labels.begin(), group->labels.end());
}

}  // namespace heterps::scheduler
