#include "simulation/run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <stdexcept>
#include <tuple>

#include "simulation/machines.h"

namespace heterps::scheduler {
namespace {

constexpr int kInstant = 30;  // as in problem/steps.cc
constexpr double kNever = std::numeric_limits<double>::infinity();

// In the order in which things of one moment are handled; the first five are those of `Simulate`.
enum class Done : int8_t {
  kBackward,
  kReturned,
  kForward,
  kCrossed,
  kSummed,
  kClosed,     // the worker has nothing more to do for the step
  kStaged,     // its part is with the shards
  kUpdated,    // the update is made
  kTold,       // a worker knows of it
  kPulled,     // a worker has its rows of a step
  kHeard,      // who commits knows that
  kCommitted,  // the shards have a step
  kAble,       // a worker knows that
  kGoesOn      // after a kill
};

struct Event {
  double at;
  Done what;
  int stage, number;  // of a micro-batch over all steps, or of a step
  int worker;
  bool operator<(const Event& other) const {  // the last of std::priority_queue is popped first
    return std::tie(at, number, what, stage, worker) >
           std::tie(other.at, other.number, other.what, other.stage, other.worker);
  }
};

struct Worker {
  bool busy = false;
  int held = 0;
  int next = 0, oldest = 0;  // the micro-batches whose forward and whose backward are next
  double link_free = 0;
  std::priority_queue<int, std::vector<int>, std::greater<>> returned;  // backwards that may run
  int updates = 0;                                                      // that it knows of
  int pulled = 0, pulling = -1,
      able = -1;         // steps: that it has, that is on its way, the last it may
  double since = 0;      // when it was last busy, or began to be
  double computing = 0;  // of that, seconds of layers
  double pull_began = 0, pull_ended = 0, told = 0;
};

// A step on its way.
struct Step {
  double drained = 0;  // when its last backward ended
  double parted = 0;   // when the shards had all parts
  double updated = 0;
};

class Run {
 public:
  Run(const std::vector<RunStage>& stages, const Serving& serving, const RunRules& rules)
      : stages_(stages),
        serving_(serving),
        rules_(rules),
        total_(static_cast<int64_t>(rules.micro_batches) * rules.steps),
        cores_(rules.cores),
        shards_(serving, stages.front().times.units),
        workers_(stages.size()),
        hosts_(stages.size()),
        arrived_(stages.size()),
        crossing_(stages.size()),
        returning_(stages.size()),
        steps_(rules.steps),
        open_(rules.steps),
        unheard_(rules.steps),
        spent_(rules.steps + 1, std::vector<std::array<double, kSpent>>(stages.size())) {
    if (total_ > std::numeric_limits<int>::max() / 2) throw std::invalid_argument("too many steps");
    std::vector<StepStage> plain;
    for (const RunStage& stage : stages) plain.push_back(stage.times);
    double longest = 0;
    for (size_t s = 0; s < stages.size(); ++s) {
      depth_.push_back(rules.whole_batch ? static_cast<int>(total_) : InFlight(plain, s));
      filling_.push_back(rules.whole_batch ? 0 : Filling(plain, s));
      longest = std::max(longest, plain[s].Busy());
      workers_[s].resize(plain[s].units);
      hosts_[s].resize((plain[s].units + stages[s].per_host - 1) / stages[s].per_host, 0.0);
      arrived_[s].resize(total_), crossing_[s].resize(total_), returning_[s].resize(total_);
      left_.emplace_back(rules.steps), parts_.emplace_back(rules.steps);
    }
    // A power of two, so that sums of whole seconds and instants are exact.
    instant_ = longest > 0 ? std::ldexp(1.0, std::ilogb(longest) - kInstant) : 0;
    for (const Kills& kills : rules.kills) kills_per_s_ += kills.per_s;
    result_.spent.resize(stages.size());
    Begin(0, 0.0);
  }

  RunResult Finish() {
    double kill = Next(0);
    StartAll();
    while (!events_.empty() && updates_ < rules_.steps) {
      if (events_.top().at >= kill) {
        now_ = kill;
        Kill();
        kill = Next(now_);
        continue;
      }
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
    if (updates_ < rules_.steps) throw std::logic_error("nothing moves");
    return Told();
  }

 private:
  Worker& At(int stage, int micro_batch) {
    return workers_[stage][micro_batch % stages_[stage].times.units];
  }
  void Touch(int stage, int micro_batch) {
    touched_.emplace_back(stage, micro_batch % stages_[stage].times.units);
  }
  int Last() const { return static_cast<int>(stages_.size()) - 1; }
  int StepOf(int micro_batch) const { return micro_batch / rules_.micro_batches; }
  // Workers of a stage that compute a part of a step: numbers on end, dealt in turn.
  int Computing(int stage) const {
    return std::min(stages_[stage].times.units, rules_.micro_batches);
  }
  // How many micro-batches of a step are a worker's of the first stage.
  int Share(int worker, int step) const {
    int units = stages_[0].times.units;
    auto before = [&](int64_t end) { return (end - worker + units - 1) / units; };
    int64_t first = static_cast<int64_t>(step) * rules_.micro_batches;
    return static_cast<int>(before(first + rules_.micro_batches) - before(first));
  }
  double Slow(int stage, int worker) const {
    const std::vector<double>& slow = stages_[stage].slowness;
    return slow.empty() ? 1.0 : slow[worker];
  }
  double Seconds(int stage, int micro_batch, double usual, bool forward) const {
    uint64_t place = (static_cast<uint64_t>(micro_batch) * stages_.size() + stage) * 2 + forward;
    int worker = micro_batch % stages_[stage].times.units;
    return usual * Slow(stage, worker) * Varied(rules_.noise, rules_.seed, place);
  }

  // All workers idle at `at`, with updates and commits up to step `from`.
  void Begin(int from, double at) {
    events_ = {};
    int first = from * rules_.micro_batches;
    for (size_t s = 0; s < stages_.size(); ++s) {
      int units = stages_[s].times.units;
      for (int w = 0; w < units; ++w) {
        Worker& worker = workers_[s][w];
        worker = Worker();
        worker.next = worker.oldest = first + ((w - first) % units + units) % units;
        worker.link_free = worker.since = worker.pull_began = worker.pull_ended = worker.told = at;
        worker.updates = worker.pulled = from;
        worker.able = from + rules_.staleness;
      }
      std::fill(hosts_[s].begin(), hosts_[s].end(), at);
      std::fill(arrived_[s].begin() + first, arrived_[s].end(), s == 0 ? at : kNever);
    }
    for (size_t s = 0; s < stages_.size(); ++s) {
      std::fill(left_[s].begin() + from, left_[s].end(), rules_.micro_batches);
      std::fill(parts_[s].begin() + from, parts_[s].end(), Computing(static_cast<int>(s)));
    }
    std::fill(open_.begin() + from, open_.end(), static_cast<int>(stages_.size()));
    std::fill(unheard_.begin() + from, unheard_.end(), Computing(0));
    std::fill(steps_.begin() + from, steps_.end(), Step());
    summed_.assign(stages_.size(), at);
    summing_.assign(stages_.size(), from);
    updates_ = committed_ = heard_ = from;
    committing_ = false;
    judge_free_ = leader_free_ = at;
    forwards_ = first;
    up_ = at;
    if (serving_.shards > 0 && at <= now_) PullAll();
  }

  // Takes the half of a crossing on the link of the worker of `stage`, then on its host's. Nothing
  // crosses in no time.
  void Cross(int stage, int micro_batch, Done done) {
    Worker& worker = At(stage, micro_batch);
    const StepStage& times = stages_[stage].times;
    worker.link_free = std::max(worker.link_free, now_) + times.cross / 2 + instant_;
    double at = worker.link_free;
    if (stages_[stage].host_link > 0) {
      double& host = hosts_[stage][micro_batch % times.units / stages_[stage].per_host];
      at = host = std::max(host, at) + stages_[stage].host_link;
    }
    (done == Done::kCrossed ? crossing_ : returning_)[stage][micro_batch] = now_;
    events_.push({at + times.way / 2, done, stage, micro_batch, 0});
  }

  void ReturnStep(int step) {
    int first = step * rules_.micro_batches;
    for (int m = first; m < first + rules_.micro_batches; ++m) At(Last(), m).returned.push(m);
    for (int w = 0; w < stages_[Last()].times.units; ++w) touched_.emplace_back(Last(), w);
  }

  // Whether every worker may have something to do now.
  bool Handle(const Event& event) {
    int s = event.stage, m = event.number;
    switch (event.what) {
      case Done::kForward:
        Rest(s, m);
        if (s == Last() && rules_.whole_batch) {
          if (++forwards_ % rules_.micro_batches == 0) ReturnStep(StepOf(forwards_) - 1);
        } else if (s == Last()) {
          At(s, m).returned.push(m);
        } else {
          Cross(s, m, Done::kCrossed);
        }
        Touch(s, m);
        break;
      case Done::kCrossed:
        arrived_[s + 1][m] = now_;
        Touch(s + 1, m);
        break;
      case Done::kBackward:
        if (double work = After(s, m); work > 0) {
          events_.push({cores_.Take(now_, work), Done::kClosed, s, m, 0});
          break;
        }
        Closed(s, m);
        break;
      case Done::kClosed:
        Closed(s, m);
        break;
      case Done::kReturned:
        At(s, m).returned.push(m);
        Touch(s, m);
        break;
      case Done::kStaged:
        Part(s, m);
        break;
      case Done::kSummed:
        if (--open_[m] > 0) break;
        if (rules_.end > 0) {
          events_.push({now_ + rules_.end, Done::kUpdated, s, m, 0});
          break;
        }
        return Updated(m);
      case Done::kUpdated:
        return Updated(m);
      case Done::kTold:
        workers_[s][event.worker].updates = m + 1;
        workers_[s][event.worker].told = now_;
        touched_.emplace_back(s, event.worker);
        break;
      case Done::kPulled:
        Pulled(event.worker, m);
        break;
      case Done::kHeard:
        Heard(m);
        break;
      case Done::kCommitted:
        Committed(m);
        break;
      case Done::kAble:
        Able(event.worker, m);
        break;
      case Done::kGoesOn:
        if (serving_.shards > 0) PullAll();
        return true;
    }
    return false;
  }

  // What a worker does on a core after a backward.
  double After(int stage, int m) const {
    bool last = m + stages_[stage].times.units >= (StepOf(m) + 1) * rules_.micro_batches;
    return rules_.part / 2 + (last ? rules_.closing : 0);
  }

  void Closed(int s, int m) {
    Rest(s, m);
    --At(s, m).held;
    if (s > 0) Cross(s - 1, m, Done::kReturned);
    ++result_.backwards;
    int step = StepOf(m);
    if (--left_[s][step] == 0) steps_[step].drained = std::max(steps_[step].drained, now_);
    bool last = m + stages_[s].times.units >= (step + 1) * rules_.micro_batches;
    if (last && s == 0 && serving_.shards > 0 && stages_[0].times.units > 1) {
      int worker = m % stages_[0].times.units;
      double at = shards_.Push(worker, now_, Share(worker, step), &cores_);
      events_.push({at, Done::kStaged, s, step, worker});
    } else if (last) {
      Part(s, step);
    }
    Touch(s, m);
  }

  // Steps are summed in their order, also where a slow worker has a part of an earlier one.
  void Part(int s, int step) {
    --parts_[s][step];
    for (; summing_[s] < rules_.steps && parts_[s][summing_[s]] == 0; ++summing_[s]) {
      step = summing_[s];
      steps_[step].parted = std::max(steps_[step].parted, now_);
      summed_[s] = std::max(now_, summed_[s]) + stages_[s].times.sync;
      events_.push({summed_[s] + stages_[s].times.delay, Done::kSummed, s, step, 0});
    }
  }

  bool Updated(int step) {
    steps_[step].updated = now_;
    updates_ = step + 1;
    if (serving_.shards > 0) Commit();
    if (rules_.tell <= 0) {
      for (std::vector<Worker>& stage : workers_) {
        for (Worker& worker : stage) worker.updates = updates_, worker.told = now_;
      }
      return true;
    }
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (int w = 0; w < stages_[s].times.units; ++w) {
        judge_free_ = std::max(judge_free_, now_) + rules_.tell;
        events_.push({judge_free_, Done::kTold, static_cast<int>(s), step, w});
      }
    }
    return false;
  }

  void PullAll() {
    for (int w = 0; w < stages_[0].times.units; ++w) Pull(w);
  }

  void Pull(int index) {
    Worker& worker = workers_[0][index];
    while (worker.pulling < 0 && worker.pulled <= worker.able && worker.pulled < rules_.steps) {
      int share = Share(index, worker.pulled);
      if (share == 0) {
        ++worker.pulled;
        continue;
      }
      worker.pulling = worker.pulled;
      worker.pull_began = now_;
      events_.push(
          {shards_.Pull(index, now_, share, &cores_), Done::kPulled, 0, worker.pulled, index});
    }
  }

  void Pulled(int index, int step) {
    Worker& worker = workers_[0][index];
    worker.pulled = step + 1, worker.pulling = -1, worker.pull_ended = now_;
    touched_.emplace_back(0, index);
    if (rules_.tell_rows > 0) {
      leader_free_ = std::max(leader_free_, now_) + rules_.tell_rows;
      events_.push({leader_free_, Done::kHeard, 0, step, index});
    } else {
      Heard(step);
    }
    Pull(index);
  }

  void Heard(int step) {
    --unheard_[step];
    while (heard_ < rules_.steps && unheard_[heard_] == 0) ++heard_;
    Commit();
  }

  void Commit() {
    int step = committed_;
    if (committing_ || step >= updates_ || step >= rules_.steps) return;
    if (heard_ < std::min(step + rules_.staleness + 1, rules_.steps)) return;
    committing_ = true;
    bool alone = stages_[0].times.units == 1;  // its part goes with the commit
    double at = alone ? shards_.Push(0, now_, rules_.micro_batches, &cores_) : now_;
    at = shards_.Commit(at, rules_.micro_batches, &cores_);
    events_.push({at, Done::kCommitted, 0, step, 0});
  }

  void Committed(int step) {
    committing_ = false;
    committed_ = step + 1;
    for (int w = 0; w < stages_[0].times.units; ++w) {
      if (rules_.tell_rows > 0) {
        leader_free_ = std::max(leader_free_, now_) + rules_.tell_rows;
        events_.push({leader_free_, Done::kAble, 0, step, w});
      } else {
        Able(w, step);
      }
    }
    Commit();
  }

  void Able(int index, int step) {
    workers_[0][index].able = step + 1 + rules_.staleness;
    Pull(index);
  }

  // The end of what a worker did for a micro-batch.
  void Rest(int s, int m) {
    Worker& worker = At(s, m);
    std::array<double, kSpent>& spent = spent_[StepOf(m)][s];
    spent[kComputing] += worker.computing;
    spent[kExecuting] += now_ - worker.since - worker.computing;
    worker.busy = false;
    worker.computing = 0;
    worker.since = now_;
  }

  // A worker that waited until now begins something of `step`: what it waited for, up to when.
  void Waited(int s, Worker* worker, int step,
              std::initializer_list<std::pair<double, Spent>> until) {
    double from = worker->since;
    for (auto [end, what] : until) {
      double upto = std::min(end, now_);
      if (upto <= from) continue;
      spent_[step][s][what] += upto - from;
      from = upto;
    }
    spent_[step][s][kForOthers] += now_ - from;
    worker->since = now_;
  }

  void StartAll() {
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (int w = 0; w < stages_[s].times.units; ++w) Start(static_cast<int>(s), w);
    }
  }

  void Start(int s, int index) {
    Worker& worker = workers_[s][index];
    if (worker.busy || now_ < up_) return;
    const StepStage& times = stages_[s].times;
    bool forward = MayForward(s, worker);
    bool fills = forward && worker.held < filling_[s];
    if (!fills && !worker.returned.empty() && worker.returned.top() == worker.oldest) {
      int m = worker.returned.top();
      worker.returned.pop();
      worker.oldest += times.units;
      double left = s < Last() ? returning_[s][m] : now_;
      Waited(s, &worker, StepOf(m), {{left, kForOthers}, {now_, kForCrossing}});
      worker.busy = true;
      worker.computing = Seconds(s, m, times.backward, false);
      events_.push({now_ + worker.computing, Done::kBackward, s, m, 0});
      return;
    }
    if (forward) Forward(s, worker.next);
  }

  bool MayForward(int s, const Worker& worker) const {
    int m = worker.next;
    if (m >= total_ || arrived_[s][m] > now_ || worker.held >= depth_[s]) return false;
    int step = StepOf(m);
    if (step - rules_.staleness > worker.updates) return false;
    if (s == 0 && serving_.shards > 0 && worker.pulled <= step) return false;
    return !(rules_.whole_batch && s == Last() && step > StepOf(forwards_));
  }

  void Forward(int s, int m) {
    Worker& worker = At(s, m);
    const StepStage& times = stages_[s].times;
    int step = StepOf(m), lacks = step - 1 - rules_.staleness;
    bool rows = s == 0 && serving_.shards > 0;
    const Step before = lacks >= 0 ? steps_[lacks] : Step();
    double told = lacks + 1 == worker.updates ? worker.told : before.updated;
    double crossed = s > 0 ? arrived_[s][m] : 0;
    if (rows && worker.pull_ended >= std::max(told, crossed)) {
      Waited(s, &worker, step,
             {{before.drained, kForOthers},
              {before.parted, kForRows},
              {before.updated, kForSums},
              {now_, kForRows}});
    } else if (told >= crossed) {
      Waited(s, &worker, step,
             {{before.drained, kForOthers}, {before.parted, kForRows}, {now_, kForSums}});
    } else {
      Waited(s, &worker, step, {{crossing_[s - 1][m], kForOthers}, {now_, kForCrossing}});
    }
    worker.busy = true;
    ++worker.held;
    worker.next += times.units;
    worker.computing = Seconds(s, m, times.forward, true);
    double ready = rules_.part > 0 ? cores_.Take(now_, rules_.part / 2) : now_;
    events_.push({ready + worker.computing, Done::kForward, s, m, 0});
  }

  // When the next unit is taken away.
  double Next(double from) {
    if (kills_per_s_ <= 0) return kNever;
    return from - std::log(Drawn(~rules_.seed, draws_++)) / kills_per_s_;
  }

  void Kill() {
    if (++result_.kills > 100'000 + 100 * rules_.steps) {
      throw std::runtime_error("units are taken away so often that no step gets done");
    }
    double pick = Drawn(~rules_.seed, draws_++) * kills_per_s_;
    size_t which = 0;
    while (which + 1 < rules_.kills.size() && pick >= rules_.kills[which].per_s) {
      pick -= rules_.kills[which++].per_s;
    }
    const Kills& kills = rules_.kills[which];
    int to = kills.back ? updates_ / rules_.cut_every * rules_.cut_every : updates_;
    double resume = std::max(up_, now_ + kills.lost_s);
    result_.redone += updates_ - to;
    for (int step = to; step <= std::min(rules_.steps, updates_ + rules_.staleness); ++step) {
      for (size_t s = 0; s < stages_.size(); ++s) {
        double done = 0;
        for (double& seconds : spent_[step][s]) done += seconds, seconds = 0;
        result_.spent[s][kLost] += done;
      }
    }
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (Worker& worker : workers_[s]) result_.spent[s][kLost] += resume - worker.since;
      for (int step = to; step < rules_.steps; ++step) {
        result_.backwards -= rules_.micro_batches - left_[s][step];
      }
    }
    Begin(to, resume);
    events_.push({resume, Done::kGoesOn, 0, to * rules_.micro_batches, 0});
  }

  RunResult Told() {
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (Worker& worker : workers_[s]) {
        const Step& last = steps_.back();
        Waited(static_cast<int>(s), &worker, rules_.steps,
               {{last.drained, kForOthers}, {last.parted, kForRows}, {now_, kForSums}});
      }
      for (const auto& step : spent_) {
        for (int kind = 0; kind < kSpent; ++kind) result_.spent[s][kind] += step[s][kind];
      }
    }
    for (const Step& step : steps_) result_.updated.push_back(step.updated);
    result_.serving = shards_.busy();
    return std::move(result_);
  }

  const std::vector<RunStage>& stages_;
  const Serving& serving_;
  const RunRules& rules_;
  const int64_t total_;
  double now_ = 0, instant_ = 0, up_ = 0;
  std::priority_queue<Event> events_;
  std::vector<int> depth_, filling_;
  Cores cores_;
  Shards shards_;
  std::vector<std::vector<Worker>> workers_;
  std::vector<std::vector<double>> hosts_;                 // until when each host's link is taken
  std::vector<std::vector<double>> arrived_;               // when, [stage, micro-batch]
  std::vector<std::vector<double>> crossing_, returning_;  // when they left
  std::vector<Step> steps_;
  std::vector<std::vector<int>> left_, parts_;  // backwards, and workers' parts, [stage, step]
  std::vector<int> open_;                       // stages that have not summed, [step]
  std::vector<int> unheard_;                    // workers of whose pull nobody knows, [step]
  std::vector<double> summed_;                  // when the sums of each stage are free
  std::vector<int> summing_;                    // the next step that each stage sums
  int updates_ = 0, committed_ = 0, heard_ = 0;
  int forwards_ = 0;  // of the last stage
  bool committing_ = false;
  double judge_free_ = 0, leader_free_ = 0;  // until when they tell, and hear
  double kills_per_s_ = 0;
  uint64_t draws_ = 0;
  std::vector<std::vector<std::array<double, kSpent>>> spent_;  // worker seconds, [step, stage]
  std::vector<std::pair<int, int>> touched_;
  RunResult result_;
};

}  // namespace

RunResult SimulateRun(const std::vector<RunStage>& stages, const Serving& serving,
                      const RunRules& rules) {
  return Run(stages, serving, rules).Finish();
}

}  // namespace heterps::scheduler
