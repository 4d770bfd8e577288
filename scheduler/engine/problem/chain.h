// The dynamic program over a chain of layers at one pace: every stage keeps ET <= tau.
//
// Runs of layers on one type are the arcs of a graph over the boundaries 0 .. layers; a plan is a
// path whose neighbouring arcs differ in type, or, where the problem has cuts, exceed its memory
// together. With the fewest units that keep tau on every arc, the shortest path is the cheapest
// plan, but for limits that several arcs share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "problem/problem.h"

namespace heterps::scheduler {

// What stages may use at one pace.
struct Target {
  double tau = kInf;
  double ps = 0;           // units of the parameter server
  double room[kMaxTypes];  // units left to stages; negative where the parameter server has none
  // Where above 0 a plan must have a stage with ET of at least this: a plan that is faster needs
  // a larger parameter server.
  double hit_from = 0;

  Target(const Problem& problem, double tau, double ps, double hit_from = 0)
      : tau(tau), ps(ps), hit_from(hit_from) {
    for (int type = 0; type < problem.types; ++type) room[type] = problem.limit[type];
    room[problem.ps_type] -= ps;
  }
};

// terms.Units(tau), settled by multiplication where rounding cannot matter.
inline double FewestUnits(const Terms& terms, double tau) {
  if (terms.far > 0) return terms.Units(tau);
  double s = terms.ds + terms.ts, p = terms.dp + terms.tp;
  double a = tau - terms.cs, b = tau - s;
  if (a < 0 || b < 0) return kInf;
  double need = std::max(terms.cp > 0 ? terms.cp / a : 0, p > 0 ? p / b : 0);
  if (!(need < 1e9)) return kInf;
  double units = static_cast<double>(static_cast<int64_t>(need));
  units += units < need || units < 1;
  double spare_c = units * a - terms.cp, spare_d = units * b - p, error = 1e-15 * units * tau;
  bool enough = spare_c > error && spare_d > error;
  bool fewest = units <= 1 || spare_c - a < -error || spare_d - b < -error;
  return enough && fewest && units <= terms.most ? units : terms.Units(tau);
}

// Calls visit(last, units, terms) for each run from `first` on `type` of at most `most` units at
// `tau`; visit returns the new `most`. Ends with the first run that, even without its transfer,
// needs more, as all longer ones do.
template <typename Visit>
void ForEachRun(const Problem& problem, int first, int type, double tau, double most, Visit visit) {
  Terms terms;
  for (int last = first; last < problem.layers; ++last) {
    if (!problem.allowed[problem.At(last, type)]) return;
    problem.Extend(&terms, last, type);
    if (terms.memory > problem.capacity[type]) return;
    double reach = most * (1 + 1e-12), slack = 1e-15 * tau;
    if (terms.cp > reach * (tau - terms.cs + slack) || tau < terms.cs) return;
    if (terms.dp > reach * (tau - terms.ds + slack) || tau < terms.ds) return;
    if (!problem.Ends(last)) continue;
    double units = FewestUnits(terms, tau);
    if (units <= most) most = visit(last, units, terms);
  }
}

// The two cheapest ways on from a boundary, of different types.
struct Ways {
  double cost[2] = {kInf, kInf};
  int32_t type[2] = {-1, -1};
  int32_t via[2] = {-1, -1};

  void Offer(double value, int32_t kind, int32_t how) {
    if (value < cost[0]) {
      if (kind != type[0]) cost[1] = cost[0], type[1] = type[0], via[1] = via[0];
      cost[0] = value, type[0] = kind, via[0] = how;
    } else if (kind != type[0] && value < cost[1]) {
      cost[1] = value, type[1] = kind, via[1] = how;
    }
  }
  // Which of the two is the cheapest that may follow a stage on `kind`, whatever its memory.
  int After(int32_t kind, bool cuts) const { return !cuts && type[0] == kind ? 1 : 0; }
};

// The cheapest ways on from each boundary that a stage before it may take.
class Onward {
 public:
  struct Way {
    double cost = kInf;
    int32_t type = -1, via = -1;
  };
  // A way of the type that is offered, by the bytes of its first stage.
  struct Sized {
    double bytes, cost;
    int32_t via;
  };

  Onward() = default;
  // None yet, but for the end, which costs so much.
  Onward(const Problem& problem, double end)
      : problem_(&problem), ways_(problem.layers + 1), again_(problem.cuts ? ways_.size() : 0) {
    ways_.back().cost[0] = end;
  }

  void Offer(int at, double cost, int32_t kind, int32_t via) { ways_[at].Offer(cost, kind, via); }
  // Once all of `kind` are offered, where neighbours may be on one type: the ways of them, from
  // little memory to much; leaves `ways` empty. Only those of the cheapest type matter.
  void Keep(int at, int32_t kind, std::vector<Sized>* ways) {
    if (ways_[at].type[0] == kind) {
      for (size_t n = ways->size(); n-- > 1;) {
        Sized &one = (*ways)[n - 1], &larger = (*ways)[n];
        if (larger.cost <= one.cost) one.cost = larger.cost, one.via = larger.via;
      }
      again_[at].swap(*ways);
    }
    ways->clear();
  }

  // Without a stage before it.
  const Ways& At(int at) const { return ways_[at]; }
  // After a stage on `kind` of so many bytes.
  Way After(int at, int32_t kind, double bytes) const {
    const Ways& ways = ways_[at];
    int which = ways.type[0] == kind;
    Way way{ways.cost[which], ways.type[which], ways.via[which]};
    if (!which || again_.empty()) return way;
    auto apart = std::partition_point(again_[at].begin(), again_[at].end(), [&](const Sized& one) {
      return !problem_->Apart(bytes, one.bytes, kind);
    });
    if (apart != again_[at].end() && apart->cost < way.cost) way = {apart->cost, kind, apart->via};
    return way;
  }
  double Cost(int at, int32_t kind, double bytes) const {
    const Ways& ways = ways_[at];
    return again_.empty() ? ways.cost[ways.type[0] == kind] : After(at, kind, bytes).cost;
  }

 private:
  const Problem* problem_ = nullptr;
  std::vector<Ways> ways_;
  std::vector<std::vector<Sized>> again_;  // where the problem has cuts
};

// A shortest path, limits shared by its stages ignored.
struct Path {
  double price = kInf;  // dollars an hour of its stages
  std::vector<int32_t> assignment;
};
Path Shortest(const Problem& problem, const Target& target);

struct Arc {
  int32_t to;  // the boundary after its last layer
  int32_t units;
  int16_t type;
  bool hit;  // its ET is at least the pace's hit_from
};

// All arcs of a pace, by the boundary they leave.
struct Graph {
  std::vector<Arc> arcs;
  std::vector<double> bytes;   // of their stages, where the problem has cuts
  std::vector<int32_t> begin;  // [layers + 1]

  double Bytes(int32_t arc) const { return bytes.empty() ? 0 : bytes[arc]; }
};
// Arcs above `most` at `price` [types] a unit are left out.
Graph Arcs(const Problem& problem, const Target& target, const std::vector<double>& price,
           double most);

// Whether `assignment` keeps the pace within the limits, and hits it where it must.
bool Fits(const Problem& problem, const Target& target, const std::vector<int32_t>& assignment);

}  // namespace heterps::scheduler
