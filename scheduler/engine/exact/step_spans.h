// What bounds of flushed plans are made from: possible stages, their units, and chains of them.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/chain.h"
#include "problem/steps.h"

namespace heterps::scheduler {

// A possible stage.
struct Span {
  int first, last, type;
  Terms terms;
};

// A cheapest chain: its stages, by their spans, and their units.
struct Chain {
  std::vector<int32_t> spans, units;
};

// So many units of a span, and what they take: `trip` is a micro-batch's there and back, `counted`
// that of the fewer units that a plan is counted as in a box, `forth` its way to the next stage;
// for the others see `step_relaxation.h`.
struct Choice {
  int units;
  double price, trip, counted, slowest, alone, again, sum, forth;
  StepStage stage;

  // Whether it is less than another in something that a step waits for, but for the trip.
  bool Eases(const Choice& other) const {
    return slowest < other.slowest || alone < other.alone || again < other.again || sum < other.sum;
  }
};

// What is the least of every stage: seconds of a micro-batch, by boundary.
struct Ahead {
  std::vector<double> trips;  // through the layers from a boundary on, there and back
  std::vector<double> forth;  // through those before it, forward
  double share = 0.5;         // of a trip that is forward

  double Before(int at) const { return trips[0] - trips[at]; }
};

// What it costs at least to get to each boundary with at most some trip, and sums before it that
// take at most so much longer than the trip back.
class TripWays {
 public:
  void Reset(int layers, int trips, int owes, double trip, double owe) {
    trips_ = trips, owes_ = owes, width_ = trip / trips, owe_ = owe / owes;
    best_.assign(static_cast<size_t>(layers + 1) * trips * owes, {});
  }
  void Offer(int at, double trip, double owed, double price, int type) {
    best_[Place(at, Cell(trip, width_, trips_), Cell(owed, owe_, owes_))].Offer(price, type, -1);
  }
  // Once all are offered: makes each cell the least of all with no more of either.
  void Finish() {
    for (size_t at = 0; at < best_.size(); at += static_cast<size_t>(trips_) * owes_) {
      for (int t = 0; t < trips_; ++t) {
        for (int o = 0; o < owes_; ++o) {
          Ways& here = best_[at + static_cast<size_t>(t) * owes_ + o];
          if (t > 0) Join(best_[at + static_cast<size_t>(t - 1) * owes_ + o], &here);
          if (o > 0) Join(best_[at + static_cast<size_t>(t) * owes_ + o - 1], &here);
        }
      }
    }
  }
  // Before a stage on `type`.
  double Least(int at, double trip, double owed, int type, bool cuts) const {
    if (!(trip >= 0) || !(owed >= 0)) return kInf;
    const Ways& here = best_[Place(at, Cell(trip, width_, trips_), Cell(owed, owe_, owes_))];
    return here.cost[here.After(type, cuts)];
  }
  double Least(int at) const { return best_[Place(at, trips_ - 1, owes_ - 1)].cost[0]; }

 private:
  static int Cell(double value, double width, int count) {
    return value < width * count ? static_cast<int>(value / width) : count - 1;
  }
  size_t Place(int at, int trip, int owed) const {
    return (static_cast<size_t>(at) * trips_ + trip) * owes_ + owed;
  }
  static void Join(const Ways& from, Ways* to) {
    for (int n : {0, 1}) {
      if (from.cost[n] < kInf) to->Offer(from.cost[n], from.type[n], -1);
    }
  }

  int trips_ = 1, owes_ = 1;
  double width_ = 1, owe_ = 1;
  std::vector<Ways> best_;  // [layers + 1, trips, owes]
};

}  // namespace heterps::scheduler
