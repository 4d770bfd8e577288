// The dynamic program over a chain of layers at one pace: every stage keeps ET <= tau.
//
// Runs of layers on one type are the arcs of a graph over the boundaries 0 .. layers; a plan is a
// path whose neighbouring arcs differ in type, unless the problem has cuts. With the fewest units
// that keep tau on every arc, the shortest path is the cheapest plan, but for limits that several
// arcs share.
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
  // Which of the two is the cheapest that may follow a stage on `kind`.
  int After(int32_t kind, bool cuts) const { return !cuts && type[0] == kind ? 1 : 0; }
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
  std::vector<int32_t> begin;  // [layers + 1]
};
// Arcs above `most` at `price` [types] a unit are left out.
Graph Arcs(const Problem& problem, const Target& target, const std::vector<double>& price,
           double most);

// Whether `assignment` keeps the pace within the limits, and hits it where it must.
bool Fits(const Problem& problem, const Target& target, const std::vector<int32_t>& assignment);

}  // namespace heterps::scheduler
