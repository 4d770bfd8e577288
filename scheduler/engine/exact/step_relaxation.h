// A bound below the cost of every flushed plan, from the time of a step and a micro-batch's trip.
//
// Of a plan whose step takes T seconds and whose trip, a micro-batch's way through all stages and
// back, takes R, each stage keeps the following, with n micro-batches a worker, P the trip through
// the stages before it, A the forward part of P, and f, b, x, g its forward, backward, crossing and
// sum, with what passes after that:
//
//   alone = max(n (f + b), f + n x + b),   P + alone <= T,   A + alone + g <= T,
//   again = (n - 1) max(f, b),             R + again <= T,   R - P + A + again + g <= T,
//
// and with A' - P' + g' of each stage before it
//
//   A' - P' + g' + max(P + alone, R + again) <= T.
//
// That is `StepBound` with the stages before: each of them adds its f + x + b to what the later
// ones take until the last backward, and f + x / 2 to when they have summed; what is away of a
// stage, itself and P make R. An earlier stage sums after its own last backward, which comes after
// those of later ones.
//
// For all plans with T and R in a box these hold with the box's largest T and its least R, so the
// cheapest chain of stages that keeps them, times the box's least T, is below the cost of each. A
// chain is a shortest path over (boundary, cell), cells being of P and of the largest A' - P' + g'.
// Of what falls into it a cell keeps the least price, the least A' - P' + g' and between what P
// lies: to every plan there is a path through cells that is no dearer, with the plan's P between
// theirs. Units that make a trip longer and ease nothing are left out: with fewer the plan keeps
// the same T, as all that is on the left grows with each trip. The box of the least bound is split,
// or, once it is small, looked at closer (`step_labels.h`).
//
// Limits that stages share are priced in: for any weights on the types' units a plan within the
// limits costs at least what it does with each unit dearer by its weight, less what the limits
// allow at these weights. Each box moves its weights by a subgradient step for those that it is
// split in.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "exact/step_labels.h"
#include "exact/step_spans.h"

namespace heterps::scheduler {

class StepRelaxation {
 public:
  // `slack` is the most seconds a sample; `labels` the most at a boundary and on a type of those
  // that bound a small box.
  StepRelaxation(const Problem& problem, const std::vector<Span>& spans, double slack,
                 size_t labels);

  // No plan that costs less than `*incumbent` has a smaller value (seconds a sample * price an
  // hour) than what is returned, at most `*incumbent`. `offer` gets the chains on the way, and may
  // lower `*incumbent`; goes on until `done`.
  double Bound(const double* incumbent, const std::function<void(const Chain&)>& offer,
               const std::function<bool()>& done);

  // Keeps what was learned, for bounds of plans that end in some way: as much as there is time for
  // until `done`.
  void Keep(double incumbent, const std::function<bool()>& done);

  // What the last stages of a plan are, from some boundary on.
  struct Rest {
    int at, type;  // the boundary, and the type of the stage after it
    const StepBound& time;
    double trip;  // of its stages, each `Trip` of its span
    double price;
    const int32_t* used;  // units, [types]
  };
  // What a micro-batch's trip through so many units of a span counts as: that with the fewer units
  // that a plan may have instead and keep its time, where there are such.
  double Trip(int32_t span, int units) const;
  // After `Keep`: the same of all plans that end so. What is at most `enough` need not be known.
  double Bound(const Rest& rest, double enough) const;

 private:
  // A number of plans: T and R from low to high, and dollars an hour that a unit of each type is
  // counted as besides its price, [types].
  struct Box {
    double value, step[2], trip[2];
    int cells;
    std::vector<double> weight;
    bool labelled = false;
    bool operator<(const Box& other) const { return value > other.value; }
  };
  struct Cell;
  // What it takes at least to get to a boundary, in the cells of a box.
  struct Way {
    double trip, price[2];
    int32_t type;  // of the last stage of the first price; the second is of all others
  };
  // A box that was left open, with the ways to each boundary by trip, and where those begin; none
  // where there was no time.
  struct Left {
    Box box;
    double price = 0;  // an hour, that all have: the parameter server's, less what limits allow
    std::vector<Way> ways;
    std::vector<size_t> begin;  // [layers + 1]
  };
  struct From {
    int32_t span, units;
    int16_t cell, way;
  };

  Choice ChoiceOf(const Span& span, int units) const;
  void Add(const Span& span);
  void AddEvery();
  void Open(const Box& box, const std::vector<Choice>& choices, const std::vector<size_t>& begin);
  double Price(const Box& box, double most, Chain* chain, Left* left = nullptr,
               TripWays* ways = nullptr);
  bool Look(Box box, const double* incumbent, const std::function<void(const Chain&)>& offer);
  void LookCloser(Box box, const double* incumbent, const std::function<void(const Chain&)>& offer,
                  const std::function<bool()>& done);
  bool Reweigh(const Chain& chain, double price, double limit, Box* box) const;
  void KeepWays(const std::vector<Cell>& cells, int count, Left* left) const;
  double MostPrice(const Box& box, double incumbent) const;
  double Outside(const Box& box) const;

  const Problem& problem_;
  const std::vector<Span>& spans_;
  double slack_;
  std::vector<std::vector<int32_t>> beginning_;  // spans by their first layer
  std::vector<Choice> choices_;
  std::vector<size_t> begin_;        // of each span's choices, [spans + 1]
  std::vector<Choice> every_;        // all units, also those that ease nothing
  std::vector<size_t> every_begin_;  // of each span's, [spans + 1]
  std::vector<Choice> open_;         // those that a box leaves
  std::vector<size_t> opened_;       // of each span's, [spans + 1]
  std::vector<double> rest_;         // what the layers from a boundary on cost at least in a box
  Ahead ahead_;
  StepLabels labels_;
  std::priority_queue<Box> boxes_;  // open
  std::vector<Left> left_;
  bool bounded_ = false;  // what is not in `left_` has no plan below the incumbent
};

}  // namespace heterps::scheduler
