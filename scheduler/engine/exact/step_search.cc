#include "exact/step_search.h"

#include <cmath>
#include <memory>
#include <queue>

#include "exact/clock.h"
#include "exact/step_before.h"
#include "exact/step_descent.h"
#include "exact/step_relaxation.h"
#include "problem/chain.h"
#include "problem/step_returns.h"
#include "problem/step_units.h"

namespace heterps::scheduler {
namespace {

constexpr int kFew = 100;
constexpr double kRelaxing = 0.6, kKeeping = 0.3;  // shares of the time that is left
constexpr double kDescending = 0.35, kWindowsASecond = 40'000, kWindowsAPair = 300;
constexpr size_t kStarts = 4;
constexpr size_t kLabelsAGroup = 200, kMostAGroup = 1000;  // of the relaxation's
constexpr double kUnreachable = 1e15;                      // samples/s
constexpr size_t kCompared = 48;     // labels at a place that a new one is compared with
constexpr double kSame = 1 - 1e-10;  // values closer than this are one

struct Label {
  StepBound time;
  double price = 0;
  double slowest = 0;  // ET of its slowest stage, s a sample
  double trip = 0;     // as the relaxation counts it
  double value = 0;    // no plan that ends this way has a smaller one
  int32_t parent = -1, span = -1, units = 0;
};

struct Open {
  double value;
  int32_t at, label;
  bool operator<(const Open& other) const {  // the last of std::priority_queue is popped first
    return value != other.value ? value > other.value : at > other.at;
  }
};

class StepSearch {
 public:
  StepSearch(const Problem& problem, double floor, StepEffort effort, double incumbent,
             bool fastest)
      : problem_(problem),
        floor_(floor),
        effort_(effort),
        fastest_(fastest),
        types_(problem.types),
        layers_(problem.layers),
        ending_(problem.layers + 1),
        incumbent_(incumbent) {
    slack_ = floor > 0 ? 1 / (floor * (1 - kTolerance)) : kInf;
    deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(std::min(effort.seconds, 1e6)));
  }

  void Add(int first, int last, int type, const Terms& terms) {
    ending_[last + 1].push_back(static_cast<int32_t>(spans_.size()));
    spans_.push_back({first, last, type, terms});
  }

  // Every stage that memory and limits allow.
  void AddAll() {
    for (int first = 0; first < layers_; ++first) {
      if (problem_.joined[first]) continue;
      for (int type = 0; type < types_; ++type) {
        Terms terms;
        for (int last = first; last < layers_; ++last) {
          if (!problem_.allowed[problem_.At(last, type)]) break;
          problem_.Extend(&terms, last, type);
          if (terms.memory > problem_.capacity[type]) break;
          if (problem_.Ends(last)) Add(first, last, type, terms);
        }
      }
    }
  }

  // Tries given stages with the fewest units at a pace, and with a few more.
  void Try(const std::vector<Stage>& stages, double tau) {
    std::vector<double> units;
    for (const Stage& stage : stages) {
      double number = stage.terms.Units(tau);
      // The fastest steps may want units that the slowest stage does not ask for.
      if (fastest_) number = std::min({number, problem_.limit[stage.type], stage.terms.most});
      if (!(number <= problem_.limit[stage.type])) return;
      number = std::min<double>(number, problem_.micro_batches * 4.0);
      while (number < problem_.micro_batches && !problem_.Deals(number)) ++number;
      units.push_back(number);
    }
    if (units == tried_) return;
    tried_ = units;
    Judge(stages, units);
  }

  void TryPaces(const std::vector<Stage>& stages) {
    double high = 0;
    for (const Stage& stage : stages) high = std::max(high, stage.terms.Busy(1));
    double step = effort_.plans < kFew ? 1.3 : 1.07;
    tried_.clear();
    for (double tau = high; tau > high / 4096; tau /= step) Try(stages, tau);
  }

  // Tries given stages with the units that flushed steps want: of many stages the search for them
  // may not come to an end.
  void TryRounded(const std::vector<Stage>& stages) {
    std::vector<int32_t> assignment;
    int code = -1;
    for (const Stage& stage : stages) {
      code = Code(stage.type, code, types_);
      assignment.resize(stage.last + 1, code);
    }
    bool fits = false;
    StepUnits rounded(problem_, fastest_ ? kUnreachable : floor_);
    rounded.Price(assignment, fastest_ ? kInf : incumbent_, &fits);
    if (rounded.units().size() == stages.size()) Judge(stages, rounded.units());
  }

  // Shortest paths at many paces, simulated.
  void TryChain() {
    double high = 0;
    for (const Span& span : spans_) high = std::max(high, span.terms.Busy(1));
    for (double tau = high, n = 0; n < 160; tau /= 1.08, ++n) {
      Path path = Shortest(problem_, Target(problem_, tau, 0));
      if (path.price == kInf) break;
      std::vector<Stage> stages;
      tried_.clear();
      if (Split(problem_, path.assignment.data(), &stages)) Try(stages, tau);
      if (paths_.empty() || paths_.back() != path.assignment) paths_.push_back(path.assignment);
      if (Clock::now() > deadline_) break;
    }
  }

  // Goes on from the best of the shortest paths, also of those that miss demands.
  void Descend() {
    auto end = Clock::now() + (deadline_ - Clock::now()) * kDescending;
    std::vector<std::pair<double, std::vector<int32_t>>> starts;
    StepUnits units(problem_, floor_);
    for (std::vector<int32_t>& path : paths_) {
      bool fits = false;
      starts.emplace_back(units.Price(path, kInf, &fits), std::move(path));
    }
    if (!found_.assignment.empty()) starts.emplace_back(0, found_.assignment);
    std::sort(starts.begin(), starts.end());
    starts.resize(std::min(starts.size(), kStarts));
    // Small problems have few plans.
    double most = std::min(kWindowsAPair * layers_ * types_, effort_.seconds * kWindowsASecond);
    int windows = static_cast<int>(most / std::max<size_t>(1, starts.size()));
    StepDescent descent(problem_, floor_);
    std::vector<Stage> stages;
    for (const auto& [price, start] : starts) {
      descent.Run(
          start, windows,
          [&](const std::vector<int32_t>& assignment, const std::vector<double>& units) {
            if (Split(problem_, assignment.data(), &stages)) Judge(stages, units);
          },
          [&] { return Clock::now() > end; });
    }
  }

  // Bounds all flushed plans by their steps' time and trip, and simulates what comes up.
  void Relax() {
    auto started = Clock::now();
    auto end = started + (deadline_ - started) * kRelaxing;
    relaxation_ = std::make_unique<StepRelaxation>(
        problem_, spans_, slack_,
        std::clamp<size_t>(effort_.labels / kLabelsAGroup, 1, kMostAGroup));
    StepUnits rounded(problem_, floor_);
    std::vector<Stage> stages;
    std::vector<int32_t> assignment(layers_);
    relaxed_ = relaxation_->Bound(
        &incumbent_,
        [&](const Chain& chain) {
          stages.clear();
          int code = -1;
          for (int32_t n : chain.spans) {
            const Span& span = spans_[n];
            stages.push_back({span.first, span.last, span.type, span.terms});
            code = Code(span.type, code, types_);
            std::fill(assignment.begin() + span.first, assignment.begin() + span.last + 1, code);
          }
          if (!Needed(stages)) return;
          Judge(stages, {chain.units.begin(), chain.units.end()});
          bool fits = false;
          rounded.Price(assignment, incumbent_, &fits);
          if (fits) Judge(stages, rounded.units());
        },
        [&] { return Clock::now() > end; });
    auto last = Clock::now() + (deadline_ - Clock::now()) * kKeeping;
    relaxation_->Keep(incumbent_, [&] { return Clock::now() > last; });
  }

  // With `thorough` labels that look worse in everything are lengthened, too, once the others are.
  StepFound Run(bool thorough) {
    if (spans_.empty()) {
      found_.bound = kInf;
      return found_;
    }
    before_ = std::make_unique<StepBefore>(problem_, spans_, ending_, slack_, fastest_,
                                           effort_.plans < kFew);
    double bound = relaxed_;
    if (thorough && bound < incumbent_ * kSame) {
      // First without the ways that look worse in everything: none of them has a smaller bound, but
      // it may have a smaller cost.
      auto end = deadline_;
      deadline_ = Clock::now() + (end - Clock::now()) / 2;
      bound = std::max(bound, Search());
      deadline_ = end;
      effort_.all = true;
    }
    if (bound < incumbent_ * kSame) bound = std::max(bound, Search());
    found_.bound = std::min(bound, incumbent_);
    if (found_.bound == kInf && found_.assignment.empty()) found_.value = kInf;
    return found_;
  }

  const StepFound& found() const { return found_; }

 private:
  // Lengthens labels, the least first; what no plan has a smaller value than.
  double Search() {
    labels_.assign(1, {});
    used_.assign(types_, 0);
    open_ = {};
    open_.push({0, layers_, 0});
    places_.assign(static_cast<size_t>(layers_ + 1) * (types_ + 1), {});
    double rest = kInf;
    for (int64_t popped = 0; !open_.empty(); ++popped) {
      Open top = open_.top();
      if (top.value >= incumbent_ * kSame) break;
      bool late = ((popped & 63) == 63 || top.at == 0) && Clock::now() > deadline_;
      if (late || labels_.size() > effort_.labels || finished_ >= effort_.plans) {
        rest = std::min(rest, top.value);
        break;
      }
      open_.pop();
      if (top.at == 0) {
        // A way that was dropped for another has no smaller bound than that one's plans.
        if (!effort_.all) rest = std::min(rest, top.value);
        Finish(top.label);
        ++finished_;
        continue;
      }
      for (int32_t span : ending_[top.at]) Lengthen(top.label, span);
    }
    return std::min(rest, incumbent_);
  }

  double Value(double tau, double price) const { return fastest_ ? tau : tau * price; }

  // A bound below every plan that goes on from a label at `at`.
  double Bound(const Label& label, int at, int type) const {
    double steps = problem_.staleness + 1.0;
    double seconds = std::max(label.time.step, label.time.pipeline + before_->Trip(at)) / steps;
    double tau = std::max(seconds / problem_.batch, label.slowest);
    if (tau > slack_ * (1 + 1e-12)) return kInf;
    if (fastest_) return tau;
    double rest = before_->Price(tau, at, type);
    double ps = problem_.ps_core_s * problem_.price[problem_.ps_type];
    return (tau * label.price + rest + ps) * (1 - 2 * kTolerance);
  }

  void Lengthen(int32_t from, int32_t at) {
    const Span& span = spans_[at];
    const Label before = labels_[from];
    int behind = before.span < 0 ? -1 : spans_[before.span].type;
    if (span.type == behind && !MayFollow(span.terms, spans_[before.span].terms, behind)) return;
    auto mine = used_.begin() + static_cast<size_t>(from) * types_;
    const std::vector<int32_t> used(mine, mine + types_);
    std::vector<int32_t> with(used);
    double room = std::min(problem_.limit[span.type] - used[span.type], span.terms.most);
    // More units than micro-batches under way have nothing to do.
    room = std::min(room, problem_.micro_batches * (problem_.staleness + 1.0));
    double price = problem_.price[span.type];
    for (int units = 1; units <= room; ++units) {
      if (!problem_.Deals(units)) continue;
      Label label;
      label.price = before.price + units * price;
      if (label.price > problem_.max_price * (1 + kTolerance)) break;
      label.slowest = std::max(before.slowest, before_->Floor(span, units));
      if (label.slowest > slack_ * (1 + 1e-12)) continue;
      StepStage stage = StageAt(problem_, span.terms, units);
      label.time = before.time.Before(stage, Rounds(problem_.micro_batches, units));
      label.value = std::max(before.value, Bound(label, span.first, span.type));
      if (relaxation_ && label.value < incumbent_ * kSame) {
        for (int type = 0; type < types_; ++type) with[type] = used[type];
        with[span.type] += units;
        label.trip = before.trip + relaxation_->Trip(at, units);
        label.value =
            std::max(label.value, relaxation_->Bound({span.first, span.type, label.time, label.trip,
                                                      label.price, with.data()},
                                                     label.value));
      }
      if (label.value >= incumbent_ * kSame) {
        // With more units its time falls, but no further than one micro-batch's.
        if (label.value == kInf || price <= 0 || fastest_) continue;
        if (label.slowest * label.price >= incumbent_ && label.slowest == before.slowest) break;
        continue;
      }
      label.parent = from;
      label.span = at;
      label.units = units;
      Keep(label, used, span);
    }
  }

  void Keep(const Label& label, std::vector<int32_t> used, const Span& span) {
    used[span.type] += label.units;
    if (!effort_.all && span.first > 0) {
      std::vector<int32_t>& here =
          places_[static_cast<size_t>(span.first) * (types_ + 1) + span.type];
      size_t first = here.size() > kCompared ? here.size() - kCompared : 0;
      for (size_t n = first; n < here.size(); ++n) {
        if (Dominates(here[n], label, used)) return;
      }
      here.push_back(static_cast<int32_t>(labels_.size()));
    }
    open_.push({label.value, span.first, static_cast<int32_t>(labels_.size())});
    labels_.push_back(label);
    used_.insert(used_.end(), used.begin(), used.end());
  }

  bool Dominates(int32_t n, const Label& label, const std::vector<int32_t>& used) const {
    const Label& mine = labels_[n];
    if (mine.price > label.price || mine.time.trip > label.time.trip ||
        mine.time.pipeline > label.time.pipeline || mine.time.step > label.time.step ||
        mine.slowest > label.slowest || Whole(mine) < Whole(label)) {
      return false;
    }
    const int32_t* own = &used_[static_cast<size_t>(n) * types_];
    for (int type = 0; type < types_; ++type) {
      if (own[type] > used[type]) return false;
    }
    return true;
  }

  void Finish(int32_t label) {
    std::vector<Stage> stages;
    std::vector<double> units;
    for (; labels_[label].parent >= 0; label = labels_[label].parent) {
      const Span& span = spans_[labels_[label].span];
      stages.push_back({span.first, span.last, span.type, span.terms});
      units.push_back(labels_[label].units);
    }
    Judge(stages, units);
  }

  // Whether every cut between stages of one type may be, and is asked for by its memory.
  bool Needed(const std::vector<Stage>& stages) const {
    for (size_t n = 1; n < stages.size(); ++n) {
      const Stage &one = stages[n - 1], &other = stages[n];
      if (one.type == other.type && !MayFollow(one.terms, other.terms, one.type)) return false;
    }
    return true;
  }

  // Whether two stages may be side by side on one type.
  bool MayFollow(const Terms& one, const Terms& other, int type) const {
    return problem_.cuts && problem_.Apart(one, other, type);
  }

  // Bytes of the first stage of a label, the more of which the more may come before it.
  double Whole(const Label& label) const {
    return problem_.cuts ? problem_.Whole(spans_[label.span].terms) : 0;
  }

  void Judge(const std::vector<Stage>& stages, const std::vector<double>& units) {
    std::vector<StepStage> made;
    double price = 0, slowest = 0;
    double used[kMaxTypes] = {};
    for (size_t n = 0; n < stages.size(); ++n) {
      const Stage& stage = stages[n];
      made.push_back(StageAt(problem_, stage.terms, units[n]));
      price += units[n] * problem_.price[stage.type];
      used[stage.type] += units[n];
      if (units[n] > stage.terms.most || !problem_.Deals(units[n])) return;
      slowest = std::max(slowest, stage.terms.Busy(units[n]));
    }
    double tau = slowest;
    if (problem_.staleness == 0) {
      double seconds = LeastSeconds(made, problem_.micro_batches);
      double least = std::max(tau, seconds / problem_.batch * (1 - kTolerance));
      if (Value(least, price) >= incumbent_ || least > slack_) return;
    } else if (Value(tau, price) >= incumbent_) {
      return;
    }
    for (size_t n = 0; n < stages.size(); ++n) {
      double bytes = Bytes(problem_, stages[n].terms, made, n);
      if (bytes > problem_.capacity[stages[n].type] * (1 + kTolerance)) return;
    }
    double seconds = StepSeconds(made, problem_.micro_batches, problem_.staleness,
                                 slowest * problem_.batch, problem_.whole_batch);
    tau = std::max(tau, seconds / problem_.batch);
    if (tau > slack_) return;
    double ps = problem_.PsUnits(problem_.Rate(tau, floor_));
    used[problem_.ps_type] += ps;
    price += ps * problem_.price[problem_.ps_type];
    if (price > problem_.max_price * (1 + kTolerance)) return;
    for (int type = 0; type < types_; ++type) {
      if (used[type] > problem_.limit[type]) return;
    }
    double value = fastest_ ? tau : price / problem_.Rate(tau, floor_);
    if (!(value < incumbent_)) return;
    incumbent_ = value;
    found_.value = value;
    found_.tau = tau;
    found_.slowest = slowest;
    found_.assignment.assign(layers_, -1);
    found_.units.clear();
    int before = -1;
    for (size_t n = 0; n < stages.size(); ++n) {
      int code = Code(stages[n].type, before, types_);
      std::fill(found_.assignment.begin() + stages[n].first,
                found_.assignment.begin() + stages[n].last + 1, code);
      found_.units.push_back(static_cast<int32_t>(units[n]));
      before = code;
    }
  }

  const Problem& problem_;
  double floor_;
  StepEffort effort_;
  bool fastest_;
  int types_, layers_;
  std::vector<Span> spans_;
  std::vector<std::vector<int32_t>> ending_;  // spans by the boundary after their last layer
  std::unique_ptr<StepBefore> before_;
  int finished_ = 0;
  std::vector<double> tried_;                // units last simulated
  std::vector<std::vector<int32_t>> paths_;  // shortest, from slow to fast
  double slack_, incumbent_;
  double relaxed_ = 0;  // no plan cheaper than the incumbent has a smaller value
  std::unique_ptr<StepRelaxation> relaxation_;
  Clock::time_point deadline_;
  std::vector<Label> labels_;
  std::vector<int32_t> used_;  // units of each type, [labels, types]
  std::vector<std::vector<int32_t>> places_;
  std::priority_queue<Open> open_;
  StepFound found_;
};

}  // namespace

StepFound SolveSteps(const Problem& problem, double floor, StepEffort effort,
                     const std::vector<std::vector<int32_t>>& starts,
                     const std::vector<Stage>* fixed, double incumbent, bool fastest) {
  StepSearch search(problem, floor, effort, incumbent, fastest);
  bool whole = !fixed && !effort.all;
  if (fixed) {
    for (const Stage& stage : *fixed) search.Add(stage.first, stage.last, stage.type, stage.terms);
    if (problem.staleness == 0) search.TryRounded(*fixed);
    search.TryPaces(*fixed);
  } else {
    search.AddAll();
    std::vector<Stage> stages;
    for (const std::vector<int32_t>& start : starts) {
      if (!Split(problem, start.data(), &stages)) continue;
      if (problem.staleness == 0) search.TryRounded(stages);
      search.TryPaces(stages);
    }
    search.TryChain();
    if (whole && !fastest && problem.staleness == 0) {
      search.Descend();
      search.Relax();
    }
  }
  return search.Run(whole);
}

}  // namespace heterps::scheduler
