#include "exact/exact.h"

#include <map>
#include <queue>

#include "exact/exact_search.h"
#include "problem/provision.h"

namespace heterps::scheduler {
namespace {

constexpr double kSame = 1 - 1e-10;  // values closer than this are one
constexpr double kCoarse = 0.1;      // gap above which bounds are raised half the way at a time
constexpr double kBeyond = 1.05;     // prices above the incumbent's looked at, to skip further

// Paces from `low` (not included) to `high`, at which no plan has a price below `least`.
struct Interval {
  double low, high, least, bound;
  bool operator<(const Interval& other) const { return bound > other.bound; }
};

// What is known after looking at one pace.
struct Settled {
  double least;   // no plan at this or a smaller tau has a lower price an hour
  double closed;  // the best plan of a tau from here to the pace is known; infinite if none is
};

// Branch and bound over the pace. Having the least price P of all paces up to tau, no pace above
// best / P is interesting, and none at all in (low, tau] when low * P is above the best.
class CheapestSearch {
 public:
  CheapestSearch(const Problem& problem, double floor, Found* found, PaceSearch* search,
                 const std::vector<Known>& known, Clock::time_point deadline)
      : problem_(problem),
        floor_(floor),
        found_(*found),
        search_(*search),
        known_(known),
        deadline_(deadline) {
    for (int type = 0; type < problem.types; ++type) {
      everything_ += problem.limit[type] * problem.price[type];
    }
  }

  void Run() {
    double low = search_.LeastTau(), high = search_.MostTau();
    if (floor_ > 0) high = std::min(high, 1 / (floor_ * (1 - kTolerance)));
    Push({low, high, 0, 0});
    while (Clock::now() <= deadline_) {
      // A quick look everywhere first, which leaves a bound; then the hard places.
      bool quick = !open_.empty() && open_.top().bound < found_.value * kSame;
      std::priority_queue<Interval>& from = quick ? open_ : hard_;
      if (from.empty() || from.top().bound >= found_.value * kSame) break;
      Interval interval = from.top();
      from.pop();
      if (Clip(&interval)) {
        Push(interval);
        continue;
      }
      double tau = quick ? Pick(interval) : interval.high;
      Settled settled = Look(tau, quick ? kQuick : kExact);
      interval.least = std::max(settled.least, interval.least);
      for (const Known& some : known_) {
        if (tau <= some.tau) interval.least = std::max(interval.least, some.least);
      }
      interval.high = std::nextafter(tau, 0);
      if (settled.closed <= tau) {
        closed_[tau] = settled.closed;
        Clip(&interval);
      } else if (Value(tau, interval.least) < found_.value * kSame) {
        if (found_.value == kInf && found_.fastest.empty()) {
          // The way to a first plan is to ask for less and less time.
          FindFastest(problem_, &search_, &found_, Soon());
        }
        double gap = 1 - Value(tau, interval.least) / found_.value;
        Interval hard = interval;
        hard.high = tau;
        hard.low = std::max(interval.low, tau * (1 - std::max(1e-4, gap / 2)));
        interval.high = std::nextafter(hard.low, 0);
        hard.bound = Value(hard.low, hard.least);
        if (quick) {
          hard_.push(hard);
        } else {
          lost_.push(hard);
        }
      } else {
        interval.high = tau * kSame;
      }
      Push(interval);
    }
    found_.bound = found_.value;
    for (auto* rest : {&open_, &hard_, &lost_}) {
      if (rest->empty() || rest->top().bound >= found_.bound * kSame) continue;
      found_.bound = rest->top().bound;
      found_.hard_tau = rest->top().high;
    }
  }

 private:
  double Value(double tau, double price) const { return price / problem_.Rate(tau, floor_); }

  void Push(Interval interval) {
    if (interval.high < interval.low || interval.least == kInf) return;
    interval.bound = std::max(interval.bound, Value(interval.low, interval.least));
    if (interval.bound < found_.value * kSame) open_.push(interval);
  }

  // Takes off what is closed; whether it did.
  bool Clip(Interval* interval) const {
    double high = interval->high;
    for (auto range = closed_.lower_bound(interval->high);
         interval->high > 0 && range != closed_.end() && range->second <= interval->high;
         range = closed_.lower_bound(interval->high)) {
      interval->high = std::nextafter(range->second, 0);
    }
    return interval->high < high;
  }

  // The next pace to look at; what lies above it goes back with a better bound.
  double Pick(const Interval& interval) {
    if (found_.value == kInf || interval.least <= 0) return interval.high;
    double aim = found_.value * (1 + kSame) / 2;
    if (interval.bound < aim * (1 - kCoarse)) aim = (aim + interval.bound) / 2;
    double tau = aim / interval.least;
    if (!(tau < interval.high)) return interval.high;
    tau = std::max(tau, interval.low);
    Interval above = interval;
    above.low = tau;
    Push(above);
    return tau;
  }

  // Looks at the plans of a tau of at most this.
  Settled Look(double tau, Effort effort) {
    double rate = problem_.Rate(tau, floor_), ps = problem_.PsUnits(rate);
    Target target(problem_, tau, ps);
    if (target.room[problem_.ps_type] < 0) return {kInf, 0};
    double ps_price = ps * problem_.price[problem_.ps_type];
    double cap = std::min(problem_.max_price, everything_) * (1 + kTolerance);
    double most = std::min(cap, kBeyond * found_.value * rate);
    bool capped = most == cap;
    most -= ps_price;
    Answer answer = search_.At(target, most, effort, Soon());
    double least = answer.bound + ps_price;
    if (answer.exact && answer.assignment.empty() && (capped || least == kInf)) return {kInf, 0};
    if (!answer.exact || answer.assignment.empty()) return {least, kInf};
    double reached = Reached(answer.assignment, tau);
    if (problem_.PsUnits(problem_.Rate(reached, floor_)) <= ps) return {least, reached};

    // That plan is faster than tau and needs a larger parameter server. Look for the cheapest
    // with this one's size.
    double from = search_.LeastTau(ps);
    if (Value(from, least) >= found_.value * kSame) return {least, from};
    target.hit_from = from;
    most = std::min(cap, found_.value * problem_.Rate(from, floor_)) - ps_price;
    answer = search_.At(target, most, effort, Soon());
    if (!answer.exact) return {least, kInf};
    if (answer.assignment.empty()) return {least, from};
    return {least, std::max(from, Reached(answer.assignment, tau))};
  }

  double Reached(const std::vector<int32_t>& assignment, double tau) const {
    std::vector<Stage> stages;
    Split(problem_, assignment.data(), &stages);
    return At(problem_, stages, tau, floor_).tau;
  }

  Clock::time_point Soon() const {
    auto now = Clock::now();
    return now + (deadline_ - now) / 3;
  }

  const Problem& problem_;
  double floor_;
  Found& found_;
  PaceSearch& search_;
  const std::vector<Known>& known_;
  Clock::time_point deadline_;
  double everything_ = 0;  // price an hour of all units on offer
  std::priority_queue<Interval> open_;
  std::priority_queue<Interval> hard_;  // a quick look at `high` was not enough
  std::priority_queue<Interval> lost_;  // nor was a long one
  std::map<double, double> closed_;     // ranges of paces, by their highest, to their lowest
};

}  // namespace

Found Solve(const Problem& problem, double floor, const std::vector<std::vector<int32_t>>& starts,
            const std::vector<Known>& known, double seconds) {
  Clock::time_point started = Clock::now();
  auto after = [&](double share) {
    return started + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(seconds * share));
  };
  Found found;
  PaceSearch search(problem, floor, &found);
  for (const std::vector<int32_t>& start : starts) search.Try(start, search.MostTau(), 0);
  CheapestSearch(problem, floor, &found, &search, known, after(0.75)).Run();
  if (!found.assignment.empty()) {
    const std::vector<int32_t> best = found.assignment;
    search.Try(best, found.tau, 0);
  }
  FindFastest(problem, &search, &found, after(1));
  return found;
}

}  // namespace heterps::scheduler
