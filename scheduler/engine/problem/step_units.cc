#include "problem/step_units.h"

namespace heterps::scheduler {
namespace {

constexpr int kSimulated = 3;   // choices of an assignment, the best by their bounds
constexpr double kMissed = 12;  // power of the factor by which demands are missed: the fine
constexpr double kFar = 1.2;    // times what is asked for: moves of single units save less
constexpr double kSlow = 1.1;   // times the floor's step: the fine is more than units save

}  // namespace

StepUnits::StepUnits(const Problem& problem, double floor)
    : problem_(problem),
      floor_(floor),
      slowest_(floor > 0 ? 1 / (floor * (1 - kTolerance)) : kInf) {}

double StepUnits::Price(const std::vector<int32_t>& assignment, double most, bool* fits) {
  *fits = false;
  units_.clear();
  if (!Split(problem_, assignment.data(), &stages_) || !List()) return kInf;
  choices_.clear();
  // Again and again the stage that is waited for longest gets more units.
  std::vector<int> at(stages_.size(), 0);
  double price = 0;
  for (const Stage& stage : stages_) price += problem_.price[stage.type];
  if (price * least_ > most) return price * least_;
  Choice best;
  bool missed = true;
  for (size_t longest = 0;; ++at[longest]) {
    longest = 0;
    for (size_t s = 1; s < at.size(); ++s) {
      if (options_[s][at[s]].wait > options_[longest][at[longest]].wait) longest = s;
    }
    bool last = at[longest] + 1 == static_cast<int>(options_[longest].size());
    if (last || options_[longest][at[longest]].wait <= kSlow * slowest_ * problem_.batch) {
      double value = Value(at, false, fits);
      choices_.push_back({value, at});
      if (value < best.value) best = choices_.back(), missed = !*fits;
    }
    if (last) break;
    int more =
        options_[longest][at[longest] + 1].stage.units - options_[longest][at[longest]].stage.units;
    price += more * problem_.price[stages_[longest].type];
    if (price * least_ > best.value) break;
  }
  *fits = false;
  if (best.value > most * kFar && !missed) return best.value;
  Improve(best);
  std::sort(choices_.begin(), choices_.end(),
            [](const Choice& a, const Choice& b) { return a.value < b.value; });
  double least = kInf;
  bool one = false;
  *fits = false;
  for (int n = 0; n < kSimulated && n < static_cast<int>(choices_.size()); ++n) {
    if (choices_[n].value > most) return std::min(least, choices_[n].value);
    if (choices_[n].value >= least) break;
    double value = Value(choices_[n].at, true, &one);
    if (!(value < least)) continue;
    least = value, *fits = one;
    units_.clear();
    for (const StepStage& stage : made_) units_.push_back(stage.units);
  }
  return least;
}

// Finds the numbers of units that are worth having; whether each stage has one.
bool StepUnits::List() {
  options_.resize(stages_.size());
  crowded_ = false;
  double trip = 0, longest = 0;
  for (size_t s = 0; s < stages_.size(); ++s) {
    const Stage& stage = stages_[s];
    options_[s].clear();
    double limit = std::min({problem_.limit[stage.type], stage.terms.most,
                             static_cast<double>(problem_.micro_batches)});
    double quickest = kInf, shortest = kInf;
    for (int units = 1; units <= limit; ++units) {
      if (!problem_.Deals(units)) continue;
      StepStage made = StageAt(problem_, stage.terms, units);
      double rounds = Rounds(problem_.micro_batches, units);
      int more = (problem_.micro_batches - 1) / units;  // micro-batches after a worker's first
      double wait = more * std::max(made.Busy(), made.cross) + made.End();
      if (!options_[s].empty() && wait >= options_[s].back().wait) continue;
      options_[s].push_back({made, wait, rounds, stage.terms.Busy(units)});
      quickest = std::min(quickest, made.Busy() + made.cross + made.way);
      shortest = std::min(shortest, rounds * made.Busy());
    }
    if (options_[s].empty()) return false;
    trip += quickest;
    longest = std::max(longest, shortest);
    double held = (problem_.micro_batches - 1) * stage.terms.held;
    crowded_ |= stage.terms.memory + held > problem_.capacity[stage.type];
  }
  least_ = std::max(trip, longest) / problem_.batch;
  return true;
}

// Whether the stages' memory does, with what is in flight.
bool StepUnits::Holds(const std::vector<int>& at) const {
  std::vector<StepStage> made;
  for (size_t s = 0; s < at.size(); ++s) made.push_back(options_[s][at[s]].stage);
  for (size_t s = 0; s < made.size(); ++s) {
    double bytes = Bytes(problem_, stages_[s].terms, made, s);
    if (bytes > problem_.capacity[stages_[s].type] * (1 + kTolerance)) return false;
  }
  return true;
}

// With the units `at`: by simulation, or by a bound below it.
double StepUnits::Value(const std::vector<int>& at, bool simulated, bool* fits) {
  *fits = false;
  if (crowded_ && !Holds(at)) return kInf;
  double price = 0, slowest = 0;
  double used[kMaxTypes];
  std::fill(used, used + problem_.types, 0.0);
  StepBound bound;
  for (size_t s = stages_.size(); s-- > 0;) {
    const Option& option = options_[s][at[s]];
    int type = stages_[s].type, units = option.stage.units;
    used[type] += units;
    price += units * problem_.price[type];
    slowest = std::max(slowest, option.slowest);
    if (!simulated) bound = bound.Before(option.stage, option.rounds);
  }
  double seconds = bound.step;
  if (simulated) {
    made_.clear();
    for (size_t s = 0; s < at.size(); ++s) made_.push_back(options_[s][at[s]].stage);
    seconds = StepSeconds(made_, problem_.micro_batches, 0, slowest * problem_.batch,
                          problem_.whole_batch);
  }
  double tau = std::max(slowest, seconds / problem_.batch);
  double ps = problem_.PsUnits(problem_.Rate(tau, floor_));
  used[problem_.ps_type] += ps;
  price += ps * problem_.price[problem_.ps_type];
  double missed = 1;  // by what factor demands are
  if (tau > slowest_) missed *= tau / slowest_;
  if (price > problem_.max_price * (1 + kTolerance)) missed *= price / problem_.max_price;
  for (int type = 0; type < problem_.types; ++type) {
    if (used[type] > problem_.limit[type]) missed *= used[type] / problem_.limit[type];
  }
  *fits = missed == 1;
  double value = price / problem_.Rate(tau, floor_);
  return *fits ? value : value * std::pow(missed, kMissed);
}

// Gives single stages more units or fewer, as long as that is better.
void StepUnits::Improve(Choice now) {
  bool better = now.value < kInf, fits = false;
  while (better) {
    better = false;
    for (size_t s = 0; s < now.at.size(); ++s) {
      for (int move : {-1, 1}) {
        int to = now.at[s] + move;
        if (to < 0 || to == static_cast<int>(options_[s].size())) continue;
        if (move < 0 && options_[s][to].wait > kSlow * slowest_ * problem_.batch) continue;
        Choice next = now;
        next.at[s] = to;
        next.value = Value(next.at, false, &fits);
        if (!(next.value < now.value * (1 - 1e-12))) continue;
        now = next;
        choices_.push_back(now);
        better = true;
      }
    }
  }
}

}  // namespace heterps::scheduler
