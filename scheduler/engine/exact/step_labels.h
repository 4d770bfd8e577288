// A closer bound for a box of flushed plans: labels from the last stage to the first.
//
// A label is a way to cover the layers from some boundary on, with what `StepBound` and
// `StepReturns` say of it. One that is no better than another in times, price and units of types
// that are short is dropped; the other stands for it, as whatever comes before, the plan takes no
// longer with it, costs no more and overdraws no more. What the layers before a boundary cost at
// least is known from the box's chain program, so that labels end early. Where there are too many,
// those that are near to each other become one that has the least of each: it stands for all of
// them, and the bound is lower for it.
//
// A box has plans by their trips without the units that ease nothing by `StepBound`. Those ease
// something by `StepReturns`, so a label has them, and the trip that it is counted as besides its
// own: a plan takes no longer, by `StepBound`, where only its earlier stages go without, and that
// is what the chain program knows of these.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "exact/step_spans.h"
#include "problem/step_returns.h"

namespace heterps::scheduler {

class StepLabels {
 public:
  // At most `most` labels at a boundary, for each type, are lengthened.
  StepLabels(const Problem& problem, const std::vector<Span>& spans, const Ahead& ahead,
             size_t most);

  // Plans of a box: seconds of a step and of a trip from low to high, what they cost an hour
  // besides their stages, and what those cost at most, both with each unit dearer by its type's
  // weight, and less what the limits allow at these; without weights they cost `ps` besides.
  struct Box {
    double step[2], trip[2];
    double outside, most, ps;
    const double* weight;  // dollars an hour that units of each type are counted as besides
    const double* room;    // units of each type that stages may have together
  };

  // Of the plans of a box no one has a smaller product of seconds and price than what is returned,
  // at most `least`; 0 where `done` before that is known. `open` are the choices that the box
  // leaves, `opened` where those of each span begin.
  double Bound(const Box& box, double least, const std::vector<Choice>& open,
               const std::vector<size_t>& opened, const TripWays& ways, Chain* chain,
               const std::function<bool()>& done);

 private:
  static constexpr int kShared = 4;  // types whose units are counted
  struct Label {
    double trip, pipeline, step;  // as `StepBound` has them, and no less than `returns` says
    double price, plain;          // with weights and without
    double counted[2];  // trips that it stands for, as a box counts them, from least to longest
    StepReturns returns;
    int32_t parent, span, units;
    int32_t used[kShared];  // units of the types that limits are short of
    uint64_t cell;
  };
  // Those at a boundary whose first stage is on one type.
  struct Group {
    std::vector<Label> labels;
    std::vector<int32_t> table;   // by cell; -1 is free
    double width = 0, grain = 1;  // of cells, in seconds and in units
  };

  static void Spread(const Label& from, Label* to);
  void Insert(Group* group, const Label& label);
  void Coarsen(Group* group);
  void Settle(Group* group);
  void Lengthen(int at, int type, const Box& box);

  const Problem& problem_;
  const std::vector<Span>& spans_;
  const Ahead& ahead_;
  size_t most_;
  std::vector<std::vector<int32_t>> ending_;  // spans by the boundary after their last layer
  std::vector<Group> groups_;                 // [layers + 1, types]
  std::vector<Label> settled_;                // of all groups so far
  std::vector<Label> here_;                   // of the group that is lengthened
  const std::vector<Choice>* open_ = nullptr;
  const std::vector<size_t>* opened_ = nullptr;
  const TripWays* ways_ = nullptr;
  int shared_[kShared];  // types that limits are short of, -1 for none
  double best_ = 0;
  Label last_;  // the best that covers all layers
};

}  // namespace heterps::scheduler
