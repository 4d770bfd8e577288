// A closer bound of a flushed step than `StepBound`: when each micro-batch is back.
//
// Of the stages from some stage on, E(c) is when the backward of micro-batch c is over at the first
// of them, at the earliest, counted from when that stage may have anything at all. A worker of it
// computes forwards in order and backwards in order, so with one more stage of k units before,
// q = floor(c / k), t the trip and E' the times of the later stages,
//
//   back(c) = x + w + max(f + E'(c), (q + 1) f + t)
//   E(c)    = max((q + 1) (f + b), f + (q + 1) x + w / 2 + b, max(back(c), E(c - k)) + b).
//
// What a slow stage lets back late is still to be computed by those before it, a whole number of
// rounds each: `StepBound` knows that of the first and the last micro-batch alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "problem/steps.h"

namespace heterps::scheduler {

struct StepReturns {
  static constexpr int kMost = 16;

  double at[kMost] = {};  // E of micro-batches 0, 1, ..

  // With one stage more before them; `trip` is that of the stages so far. Of steps of more
  // micro-batches than `kMost` nothing is known.
  StepReturns Before(const StepStage& stage, double trip, int micro_batches) const {
    StepReturns made;
    if (micro_batches > kMost) return made;
    double f = stage.forward, b = stage.backward, across = stage.cross + stage.way;
    for (int from = 0, round = 1; from < micro_batches; from += stage.units, ++round) {
      double own = std::max(round * (f + b), f + round * stage.cross + stage.way / 2 + b);
      double first = round * f + trip;
      int to = std::min(from + stage.units, micro_batches);
      for (int c = from; c < to; ++c) {
        double back = across + std::max(f + at[c], first);
        if (from > 0) back = std::max(back, made.at[c - stage.units]);
        made.at[c] = std::max(own, back + b);
      }
    }
    return made;
  }

  // When the last of them is over.
  double Last() const { return *std::max_element(at, at + kMost); }
};

// Both bounds of a flushed step, each with what the other says.
struct StepLeast {
  StepBound bound;
  StepReturns returns;

  // With one stage more before them.
  StepLeast Before(const StepStage& stage, int micro_batches) const {
    StepLeast made;
    made.returns = returns.Before(stage, bound.trip, micro_batches);
    made.bound = bound.Before(stage, Rounds(micro_batches, stage.units));
    made.bound.pipeline = std::max(made.bound.pipeline, made.returns.Last());
    made.bound.step = std::max(made.bound.step, made.bound.pipeline + stage.End());
    return made;
  }
};

// Seconds that a flushed step of these stages takes, and no fewer.
inline double LeastSeconds(const std::vector<StepStage>& stages, int micro_batches) {
  StepLeast least;
  for (size_t s = stages.size(); s-- > 0;) least = least.Before(stages[s], micro_batches);
  return least.bound.step;
}

}  // namespace heterps::scheduler
