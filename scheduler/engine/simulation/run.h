// A training on machines that have limits: the executor's rules as `Simulate` of problem/steps.h
// has them, and besides what that leaves out.
//
// Times vary and some workers are slower. Rows of the first stage are pulled from shards, each of
// which serves one message after another: a step's rows once the commit of step t - 1 - S is known,
// as far ahead as that allows. A step's gradients of them are parts that the shards have to have
// before the stage's sum is complete; once all workers have pulled step t + S, the first one
// commits step t. What crosses from host to host takes turns on the hosts' links, what is told to
// many goes out one after the other, and what the executor does beside the layers takes cores,
// which processes may have to share. Units are taken away at random: all wait for a while and begin
// anew after the last update, or the last cut.
//
// Without any of this the times are those of `Simulate`, but for rounding (1e-9).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "problem/steps.h"

namespace heterps::scheduler {

struct RunStage {
  StepStage times;
  std::vector<double> slowness;  // a factor of each worker's times; none: 1
  double host_link = 0;          // s a micro-batch, each way, on the link of its worker's host
  int per_host = 1;              // workers that share a host's link
};

// Rows of the first stage. All seconds but those of a message are of a micro-batch's rows at one
// shard, a commit's of each micro-batch of the step.
struct Serving {
  int shards = 0;
  bool priced = false;  // the layers' times have what pulls and pushes take at idle shards
  double way = 0;       // a message, one way
  double client_message = 0, client_pull = 0, client_push = 0;  // on the worker's core
  double message = 0, pull = 0, push = 0, commit = 0;           // on the shard's core
  double pull_link = 0, push_link = 0, shard_pull_link = 0, shard_push_link = 0;
  std::vector<double> slowness;  // a factor of each shard's times; none: 1
};

struct Kills {
  double per_s = 0;
  double lost_s = 0;  // until all go on
  bool back = false;  // to the last cut, not the last update
};

struct RunRules {
  int micro_batches = 1, staleness = 0, steps = 1;
  bool whole_batch = false;
  double end = 0;      // from the last sum until the update is made; keeps nobody busy
  double part = 0;     // of a core, a micro-batch, half before its forward, half after its backward
  double closing = 0;  // of a core, a worker and step, after its last backward
  double tell = 0;     // to tell one more worker of an update
  double tell_rows = 0;  // to tell one more worker of a commit, and to hear of a pull
  int cores = 0;         // that all processes share; 0: each has its own
  double noise = 0;      // standard deviation of a time over its mean
  uint64_t seed = 0;
  std::vector<Kills> kills;
  int cut_every = 1;  // steps
};

// What a worker's time goes into.
enum Spent { kComputing, kExecuting, kForRows, kForSums, kForCrossing, kForOthers, kLost, kSpent };

struct RunResult {
  std::vector<double> updated;                    // when, [step]
  std::vector<std::array<double, kSpent>> spent;  // worker seconds, by stage
  int kills = 0;
  int64_t redone = 0;     // updates made once more
  int64_t backwards = 0;  // that counted, over all stages
  double serving = 0;     // shard seconds
};

// Throws std::runtime_error where kills come so often that nothing gets done.
RunResult SimulateRun(const std::vector<RunStage>& stages, const Serving& serving,
                      const RunRules& rules);

}  // namespace heterps::scheduler
