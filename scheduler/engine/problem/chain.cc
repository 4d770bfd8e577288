#include "problem/chain.h"

#include "problem/provision.h"

namespace heterps::scheduler {

Path Shortest(const Problem& problem, const Target& target) {
  int layers = problem.layers;
  Onward ways(problem, 0);
  std::vector<Onward::Sized> sized;
  for (int first = layers - 1; first >= 0; --first) {
    const Ways& here = ways.At(first);
    for (int turn = -1; turn < problem.types; ++turn) {
      // The type that was best one layer on goes first: it sets a bar for the others.
      int ahead = std::max(ways.At(first + 1).type[0], 0);
      int type = turn < 0 ? ahead : turn;
      if ((turn >= 0 && type == ahead) || target.room[type] < 1) continue;
      double price = problem.price[type], least = kInf;
      int via = -1;
      auto most = [&](double bar) {
        return price > 0 ? std::min(target.room[type], bar / price) : target.room[type];
      };
      ForEachRun(problem, first, type, target.tau, most(here.cost[1]),
                 [&](int last, double units, const Terms& terms) {
                   double bytes = problem.cuts ? problem.Whole(terms) : 0;
                   double cost = units * price + ways.Cost(last + 1, type, bytes);
                   if (cost < least) least = cost, via = last + 1;
                   if (!problem.cuts) return most(std::min(here.cost[1], least));
                   // A dearer stage of more memory may follow what a cheaper one may not.
                   sized.push_back({bytes, cost, last + 1});
                   return most(here.cost[1]);
                 });
      if (via >= 0) ways.Offer(first, least, type, via);
      if (problem.cuts) ways.Keep(first, type, &sized);
    }
  }
  Path path;
  path.price = ways.At(0).cost[0];
  if (path.price == kInf) return path;
  path.assignment.resize(layers);
  double bytes = 0;
  for (int at = 0, type = -1; at < layers;) {
    Onward::Way way = ways.After(at, type, bytes);
    type = way.type;
    int code = Code(type, at > 0 ? path.assignment[at - 1] : -1, problem.types);
    std::fill(path.assignment.begin() + at, path.assignment.begin() + way.via, code);
    Terms terms;
    for (; at < way.via; ++at) problem.Extend(&terms, at, type);
    bytes = problem.Whole(terms);
  }
  return path;
}

Graph Arcs(const Problem& problem, const Target& target, const std::vector<double>& price,
           double most) {
  Graph graph;
  graph.begin.reserve(problem.layers + 1);
  for (int first = 0; first < problem.layers; ++first) {
    graph.begin.push_back(static_cast<int32_t>(graph.arcs.size()));
    for (int type = 0; type < problem.types; ++type) {
      double room = target.room[type];
      if (price[type] > 0) room = std::min(room, most / price[type]);
      if (room < 1) continue;
      ForEachRun(problem, first, type, target.tau, room,
                 [&](int last, double units, const Terms& terms) {
                   bool hit = target.hit_from <= 0 || terms.Busy(units) >= target.hit_from;
                   graph.arcs.push_back(
                       {last + 1, static_cast<int32_t>(units), static_cast<int16_t>(type), hit});
                   if (problem.cuts) graph.bytes.push_back(problem.Whole(terms));
                   return room;
                 });
    }
  }
  graph.begin.push_back(static_cast<int32_t>(graph.arcs.size()));
  return graph;
}

bool Fits(const Problem& problem, const Target& target, const std::vector<int32_t>& assignment) {
  std::vector<Stage> stages;
  if (!Split(problem, assignment.data(), &stages)) return false;
  double used[kMaxTypes] = {};
  bool hit = target.hit_from <= 0;
  for (const Stage& stage : stages) {
    double units = stage.terms.Units(target.tau);
    used[stage.type] += units;
    if (!(used[stage.type] <= target.room[stage.type])) return false;
    hit = hit || stage.terms.Busy(units) >= target.hit_from;
  }
  return hit && target.room[problem.ps_type] >= 0;
}

}  // namespace heterps::scheduler
