#include "problem/steps.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <tuple>

namespace heterps::scheduler {
namespace {

constexpr double kFull = 0.998;  // of the slowest stage's pace: more a few steps cannot tell
constexpr double kShift = 0.05;  // of a micro-batch's time, from forward to backward or back
constexpr int kInstant = 30;     // the shortest crossing is the slowest worker's time / 2^30

enum class Done : int8_t { kBackward, kReturned, kForward, kCrossed, kSummed };

struct Event {
  double at;
  Done what;
  int stage, micro_batch;                     // counted over all steps
  bool operator<(const Event& other) const {  // the last of std::priority_queue is popped first
    return std::tie(at, micro_batch, what, stage) >
           std::tie(other.at, other.micro_batch, other.what, other.stage);
  }
};

struct Worker {
  bool busy = false;
  int held = 0;
  int next, oldest;  // the micro-batches whose forward and whose backward are next
  double link_free = 0;
  std::priority_queue<int, std::vector<int>, std::greater<>> returned;  // backwards that may run
};

class Simulation {
 public:
  Simulation(const std::vector<StepStage>& stages, int micro_batches, int staleness, int steps,
             bool whole_batch)
      : stages_(stages),
        micro_batches_(micro_batches),
        staleness_(staleness),
        total_(micro_batches * steps),
        whole_batch_(whole_batch),
        workers_(stages.size()),
        arrived_(stages.size(), std::vector<bool>(total_, false)),
        left_(stages.size(), std::vector<int>(steps, micro_batches)),
        open_(steps, static_cast<int>(stages.size())),
        summed_(stages.size(), 0.0),
        updated_(steps, 0.0) {
    double longest = 0;
    for (size_t s = 0; s < stages.size(); ++s) {
      depth_.push_back(whole_batch ? total_ : InFlight(stages, s));
      filling_.push_back(whole_batch ? 0 : Filling(stages, s));
      longest = std::max(longest, stages[s].Busy());
      for (int w = 0; w < stages[s].units; ++w) workers_[s].push_back({.next = w, .oldest = w});
    }
    std::fill(arrived_[0].begin(), arrived_[0].end(), true);
    // A power of two, so that sums of whole seconds and instants are exact.
    instant_ = longest > 0 ? std::ldexp(1.0, std::ilogb(longest) - kInstant) : 0;
  }

  std::vector<double> Run() {
    StartAll();
    while (!events_.empty()) {
      now_ = events_.top().at;
      touched_.clear();
      bool all = false;
      while (!events_.empty() && events_.top().at <= now_) {
        Event event = events_.top();
        events_.pop();
        all |= Handle(event);
      }
      if (all) {
        StartAll();
      } else {
        for (auto [stage, worker] : touched_) Start(stage, worker);
      }
    }
    return updated_;
  }

 private:
  Worker& At(int stage, int micro_batch) {
    return workers_[stage][micro_batch % stages_[stage].units];
  }
  void Touch(int stage, int micro_batch) {
    touched_.emplace_back(stage, micro_batch % stages_[stage].units);
  }

  // Takes the half of a crossing on the link of the worker of `stage`. Nothing crosses in no time:
  // what leaves a worker finds another, that ends something at that moment, busy with what it had.
  void Cross(int stage, int micro_batch, Done done) {
    Worker& worker = At(stage, micro_batch);
    worker.link_free = std::max(worker.link_free, now_) + stages_[stage].cross / 2 + instant_;
    events_.push({worker.link_free + stages_[stage].way / 2, done, stage, micro_batch});
  }

  // The loss of a step's batch is there: its backwards may begin.
  void ReturnStep(int step) {
    int last = static_cast<int>(stages_.size()) - 1;
    for (int m = step * micro_batches_; m < (step + 1) * micro_batches_; ++m) {
      At(last, m).returned.push(m);
    }
    for (int w = 0; w < stages_[last].units; ++w) touched_.emplace_back(last, w);
  }

  // Whether every worker may have something to do now.
  bool Handle(const Event& event) {
    int last = static_cast<int>(stages_.size()) - 1, s = event.stage, m = event.micro_batch;
    switch (event.what) {
      case Done::kForward:
        At(s, m).busy = false;
        if (s == last && whole_batch_) {
          if (++forwards_ % micro_batches_ == 0) ReturnStep(forwards_ / micro_batches_ - 1);
        } else if (s == last) {
          At(s, m).returned.push(m);
        } else {
          Cross(s, m, Done::kCrossed);
        }
        Touch(s, m);
        break;
      case Done::kCrossed:
        arrived_[s + 1][m] = true;
        Touch(s + 1, m);
        break;
      case Done::kBackward: {
        At(s, m).busy = false;
        --At(s, m).held;
        if (s > 0) Cross(s - 1, m, Done::kReturned);
        int step = m / micro_batches_;
        if (--left_[s][step] == 0) {
          summed_[s] = std::max(now_, summed_[s]) + stages_[s].sync;
          events_.push({summed_[s] + stages_[s].delay, Done::kSummed, s, m});
        }
        Touch(s, m);
        break;
      }
      case Done::kReturned:
        At(s, m).returned.push(m);
        Touch(s, m);
        break;
      case Done::kSummed: {
        int step = m / micro_batches_;
        if (--open_[step] > 0) break;
        updated_[step] = now_;
        updates_ = step + 1;
        return true;
      }
    }
    return false;
  }

  void StartAll() {
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (int w = 0; w < stages_[s].units; ++w) Start(static_cast<int>(s), w);
    }
  }

  void Start(int stage, int index) {
    Worker& worker = workers_[stage][index];
    if (worker.busy) return;
    bool forward = MayForward(stage, worker);
    bool fills = forward && worker.held < filling_[stage];
    if (!fills && !worker.returned.empty() && worker.returned.top() == worker.oldest) {
      int m = worker.returned.top();
      worker.returned.pop();
      worker.oldest += stages_[stage].units;
      worker.busy = true;
      events_.push({now_ + stages_[stage].backward, Done::kBackward, stage, m});
      return;
    }
    if (!forward) return;
    int m = worker.next;
    worker.busy = true;
    ++worker.held;
    worker.next += stages_[stage].units;
    events_.push({now_ + stages_[stage].forward, Done::kForward, stage, m});
  }

  bool MayForward(int stage, const Worker& worker) const {
    int m = worker.next;
    if (m >= total_ || !arrived_[stage][m] || worker.held >= depth_[stage]) return false;
    if (m / micro_batches_ - staleness_ > updates_) return false;
    bool last = stage + 1 == static_cast<int>(stages_.size());
    return !(whole_batch_ && last && m / micro_batches_ > forwards_ / micro_batches_);
  }

  const std::vector<StepStage>& stages_;
  int micro_batches_, staleness_, total_;
  bool whole_batch_;
  double now_ = 0, instant_ = 0;
  int updates_ = 0;
  int forwards_ = 0;  // of the last stage
  std::priority_queue<Event> events_;
  std::vector<int> depth_, filling_;
  std::vector<std::vector<Worker>> workers_;
  std::vector<std::vector<bool>> arrived_;  // [stage, micro-batch]
  std::vector<std::vector<int>> left_;      // backwards, [stage, step]
  std::vector<int> open_;                   // stages that have not summed, [step]
  std::vector<double> summed_;              // when the sums of each stage are free
  std::vector<double> updated_;
  std::vector<std::pair<int, int>> touched_;
};

}  // namespace

StepStage StageAt(const Problem& problem, const Terms& terms, double units) {
  double samples = problem.batch / problem.micro_batches;
  double busy = (terms.cs * units + terms.cp) * samples;
  StepStage stage;
  stage.units = static_cast<int>(units);
  stage.forward = (terms.fs * units + terms.fp) * samples;
  stage.backward = std::max(0.0, busy - stage.forward);
  stage.forward += terms.handled / 2;
  stage.backward += terms.handled / 2;
  stage.cross = (terms.ts * units + terms.tp) * samples;
  stage.way = terms.way;
  double summing = std::min(units, static_cast<double>(problem.micro_batches));
  stage.sync = (terms.Summing(units) + terms.dp / summing) * problem.batch;
  stage.delay = terms.delay * problem.batch;
  return stage;
}

int Filling(const std::vector<StepStage>& stages, size_t stage) {
  int units = 0, own = stages[stage].units;
  for (size_t s = stage; s < stages.size(); ++s) units += stages[s].units;
  return (units + own - 1) / own;
}

int InFlight(const std::vector<StepStage>& stages, size_t stage) {
  return 2 * Filling(stages, stage);
}

double Bytes(const Problem& problem, const Terms& terms, const std::vector<StepStage>& stages,
             size_t stage) {
  int own = stages[stage].units;
  int most = (problem.micro_batches + own - 1) / own * (problem.staleness + 1);
  // As `protos.in_flight` has it.
  bool at_once = problem.whole_batch || (problem.lockstep && stage + 1 < stages.size());
  int held = at_once ? most : std::min(InFlight(stages, stage), most);
  return terms.memory + (held - 1) * terms.held;
}

std::vector<double> Simulate(const std::vector<StepStage>& stages, int micro_batches, int staleness,
                             int steps, bool whole_batch) {
  std::vector<double> at = Simulation(stages, micro_batches, staleness, steps, whole_batch).Run();
  std::adjacent_difference(at.begin(), at.end(), at.begin());
  return at;
}

double StepSeconds(const std::vector<StepStage>& stages, int micro_batches, int staleness,
                   double slowest, bool whole_batch) {
  if (staleness == 0) {
    return std::max(slowest, Simulate(stages, micro_batches, 0, 1, whole_batch)[0]);
  }
  int units = 0;
  for (const StepStage& stage : stages) units += stage.units;
  // Steps to fill the pipeline, and as many again to measure: whole turns of S+1, as where an
  // update comes late the steps that wait for it are as far apart as that.
  int count = 4 + 96 / micro_batches + 4 * (units / micro_batches) + 2 * staleness;
  count += staleness - (count - 1) % (staleness + 1);
  // With few micro-batches in flight these run apart or one behind the other, and which of the two
  // turns on a little: the slower one counts.
  double longest = slowest;
  for (double shift : {0.0, -kShift, kShift}) {
    std::vector<StepStage> shifted = stages;
    for (StepStage& stage : shifted) {
      double moved = std::clamp(shift * stage.Busy(), -stage.forward, stage.backward);
      stage.forward += moved, stage.backward -= moved;
    }
    std::vector<double> seconds =
        Simulate(shifted, micro_batches, staleness, 2 * count, whole_batch);
    double mean = std::accumulate(seconds.begin() + count, seconds.end(), 0.0) / count;
    if (mean * kFull > longest) longest = mean;
  }
  return longest;
}

}  // namespace heterps::scheduler
