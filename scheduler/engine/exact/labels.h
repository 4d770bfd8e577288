// The cheapest plan at one pace where stages share the limits of their types.
//
// A multiplier on each limit makes it a price and the problem a shortest path again, whose length
// is a lower bound (Lagrangian relaxation); the best multipliers are found by subgradient steps.
// What remains open is settled by a label-setting search: a label is a way to cover the first
// layers, ordered by its price plus the relaxation's cost to go, and dropped when another at the
// same place uses no more of anything. A beam search over the same labels finds good plans first.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "exact/clock.h"
#include "problem/chain.h"
#include "problem/problem.h"

namespace heterps::scheduler {

// What to look for, and how hard.
struct Effort {
  bool any;            // any plan within the limits, or the proof that there is none; else the
                       // cheapest
  size_t most_labels;  // made before the search gives up
  size_t width;        // labels kept at each boundary by the beam search before it
};
constexpr Effort kQuick{false, 5'000, 8}, kExact{false, 100'000, 200};
constexpr Effort kQuickAny{true, 2'000, 8}, kAny{true, 100'000, 200};

struct Answer {
  // No plan at this pace within the limits has a lower price an hour of its stages; at most the
  // price looked for.
  double bound = kInf;
  double price = kInf;              // of `assignment`, where the cheapest was looked for
  std::vector<int32_t> assignment;  // the cheapest found within the limits; empty if none
  bool exact = false;               // bound is price, or above what was asked for
};

class SharedLimits {
 public:
  using Visit = std::function<void(const std::vector<int32_t>&)>;

  // Keeps references. `price` [types] of a unit is what is minimised; plans above `most` are not
  // looked for.
  SharedLimits(const Problem& problem, const Target& target, std::vector<double> price,
               double most);

  // `multipliers` [types], dollars an hour a unit: where to start, and the best found. Every path
  // met on the way goes to `visit`, within the limits or not.
  Answer Solve(std::vector<double>* multipliers, Effort effort, Clock::time_point deadline,
               const Visit& visit);

 private:
  // Costs to go from each boundary: `free`, and `must` with an arc still to hit the pace.
  struct Rest {
    Onward free, must;
    const Onward& At(bool hit) const { return hit ? free : must; }
  };
  Rest CostsToGo(const std::vector<double>& weight) const;
  std::vector<int32_t> Walk(const Rest& rest, std::vector<double>* used, double* price) const;
  double Step(std::vector<double>* multipliers, double current, double target,
              const std::vector<double>& used) const;
  std::vector<double> Weights(const std::vector<double>& multipliers) const;
  double Constant(const std::vector<double>& multipliers) const;
  void Fix(const std::vector<double>& multipliers);
  // Whether the arc `next` may follow a stage on `type` of so many bytes.
  bool MayFollow(int32_t next, int type, double bytes) const {
    return graph_.arcs[next].type != type ||
           (problem_.cuts && problem_.Apart(bytes, graph_.Bytes(next), type));
  }
  // What a label's bound and its units still to come are read from.
  struct Rests {
    Rest guided, plain;        // with and without the multipliers
    std::vector<int> tight;    // the types whose limit some path exceeds
    std::vector<Rest> fewest;  // units of each tight type
  };
  std::vector<int> Tight() const;
  Rests AllCostsToGo(const std::vector<double>& multipliers) const;
  void Dive(const std::vector<double>& multipliers, const Rests& rests, Effort effort,
            const Visit& visit, Answer* answer) const;
  void Search(const std::vector<double>& multipliers, const Rests& rests, Effort effort,
              Clock::time_point deadline, const Visit& visit, Answer* answer) const;

  const Problem& problem_;
  const Target& target_;
  std::vector<double> price_;
  double most_;
  bool must_hit_;
  Graph graph_;
};

}  // namespace heterps::scheduler
