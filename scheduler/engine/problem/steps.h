// Optimizer steps: a discrete-event simulation of the executor, and a bound below what it takes.
//
// A step's micro-batches are dealt over the workers of each stage by a counter that runs on over
// steps. A worker computes one thing at a time: the next forward if that has arrived and too few
// micro-batches to fill the stages are between forward and backward, else the backward of its
// earliest one if that has returned, else the next forward, unless there are as many between the
// two as it may hold. What crosses to the next stage and what comes back for it passes one
// link of the worker, one after the other, and is on its way for a while. Once the backwards of a
// step are done, the stage's workers sum its gradients; when all stages have, and what keeps
// nothing busy has passed after each sum, the step's update is made. The forward of step t waits
// for update t - 1 - S, S being the staleness.
//
// Where the loss is one of whole batches, the last stage's backwards of a step, and its forwards of
// the next, wait for all of its forwards of the step; so every stage may hold all of a step.
#pragma once

#include <algorithm>
#include <vector>

#include "problem/problem.h"
#include "problem/provision.h"

namespace heterps::scheduler {

// A stage with its units: seconds a micro-batch of a worker, and of a step.
struct StepStage {
  int units = 1;
  double forward = 0, backward = 0;
  double cross = 0;  // on the worker's link, forth and back each a half; 0 of the last stage
  double sync = 0;   // after the last backward of a step
  double way = 0;    // as cross, but nothing waits for another meanwhile
  double delay = 0;  // as sync, after it, but the next step's may pass meanwhile

  double End() const { return sync + delay; }

  double Busy() const { return forward + backward; }
};

// What `terms` come to with `units` units; more than there are micro-batches only wait.
StepStage StageAt(const Problem& problem, const Terms& terms, double units);

// Micro-batches of a worker of `stage` that are on their way where all stages have something to do
// and are equally fast in all. Where the loss is one of whole batches, nothing is to be filled.
int Filling(const std::vector<StepStage>& stages, size_t stage);

// Micro-batches that a worker of `stage` may have between their forward and their backward, were
// there any number of them, and the loss none of whole batches.
int InFlight(const std::vector<StepStage>& stages, size_t stage);

// Memory of a unit of a stage of these terms, with what it has in flight; those hold one
// micro-batch.
double Bytes(const Problem& problem, const Terms& terms, const std::vector<StepStage>& stages,
             size_t stage);

// Seconds of each of `steps` steps on end: between the updates.
std::vector<double> Simulate(const std::vector<StepStage>& stages, int micro_batches, int staleness,
                             int steps, bool whole_batch);

// Seconds a step once the pipeline is as full as it gets, at least `slowest`: those of its slowest
// stage.
double StepSeconds(const std::vector<StepStage>& stages, int micro_batches, int staleness,
                   double slowest, bool whole_batch);

// The most micro-batches of a step that a worker of a stage of so many units gets.
inline double Rounds(int micro_batches, int units) { return (micro_batches + units - 1) / units; }

// Seconds that a flushed step takes, and no fewer: of the stages from some stage on.
struct StepBound {
  double trip = 0;      // a micro-batch there and back
  double pipeline = 0;  // until the last backward leaves
  double step = 0;      // until everything is summed

  // With one stage more before them, whose workers get `rounds` micro-batches at most.
  StepBound Before(const StepStage& stage, double rounds) const {
    double f = stage.forward, b = stage.backward;
    double across = stage.cross + stage.way, away = trip + across;
    StepBound bound;
    bound.trip = away + f + b;
    bound.pipeline =
        std::max({rounds * (f + b), away + f + rounds * b, away + b + rounds * f,
                  f + rounds * stage.cross + stage.way / 2 + b, f + across + pipeline + b});
    bound.step = std::max(bound.pipeline + stage.End(), f + across / 2 + step);
    return bound;
  }
};

}  // namespace heterps::scheduler
