// One planning problem: layer costs as serial and parallel seconds a sample, prices and limits.
//
// A stage is a run of consecutive layers on one type. With k units it takes
//   ET(k) = max(cs + cp / k, ds + dp / k)
// seconds a sample, where the four terms are sums over its layers; ds and dp also hold the last
// layer's transfer unless the stage is the final one. See scheduler/problem/cost.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace heterps::scheduler {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Measured times do not carry nine digits: a floor or cap missed by less is met.
constexpr double kTolerance = 1e-9;
constexpr int kMaxTypes = 64;

// Serial and parallel seconds a sample of a run of layers on one type, and its memory.
struct Terms {
  double cs = 0, cp = 0, ds = 0, dp = 0;  // CT and DT, without the last layer's transfer
  double ts = 0, tp = 0;                  // that transfer
  double way = 0;                         // of a micro-batch to the next stage and back, besides
  double delay = 0;                       // at the end of a step, while nothing is busy
  double far = 0;                         // of DT besides, where units are on several hosts
  double near = kInf;                     // units that are on one
  double handled = 0;     // of a micro-batch, what its worker is busy with for the stages beside it
  int first = -1;         // its first layer
  double fs = 0, fp = 0;  // the forward's part of CT
  double memory = 0;
  double held = 0;     // of memory, for each micro-batch in flight
  double most = kInf;  // units that it may have

  // What DT has besides its transfer, whatever the number of units that are on as many hosts.
  double Summing(double units) const { return units > near ? ds + far : ds; }

  double Busy(double units) const { return Busy(units, Summing(units)); }

  // The least ET of up to so many units: those of several hosts may take longer than those of one.
  double Least(double units) const {
    return units > near ? std::min(Busy(near), Busy(units)) : Busy(units);
  }

  // Fewest units with ET <= tau, at least 1; infinite where no number is enough.
  double Units(double tau) const {
    double units = Units(tau, ds);
    if (units > near && far > 0) units = std::max(near + 1, Units(tau, ds + far));
    return units <= most ? units : kInf;
  }

  // The same as a real number, for features and bounds.
  double Fraction(double tau) const {
    double s = ds + ts, p = dp + tp;
    double need = 0;
    if (cp > 0) need = tau > cs ? cp / (tau - cs) : kInf;
    if (p > 0) need = std::max(need, tau > s ? p / (tau - s) : kInf);
    return tau < cs || tau < s ? kInf : need;
  }

 private:
  double Busy(double units, double summing) const {
    return std::max(cs + cp / units, (summing + ts) + (dp + tp) / units);
  }

  // Where sums take `summing`.
  double Units(double tau, double summing) const {
    double s = summing + ts, p = dp + tp;
    if (tau < cs || tau < s) return kInf;
    double need = 1;
    if (cp > 0) need = tau > cs ? std::max(need, cp / (tau - cs)) : kInf;
    if (p > 0) need = tau > s ? std::max(need, p / (tau - s)) : kInf;
    if (!(need < 1e9)) return kInf;
    double units = std::ceil(need);
    // The division rounds: settle on the ET itself, one unit either way.
    if (Busy(units, summing) > tau) {
      units += 1;
    } else if (units > 1 && Busy(units - 1, summing) <= tau) {
      units -= 1;
    }
    return Busy(units, summing) <= tau ? units : kInf;
  }
};

// What stands for `type` in an assignment where the neighbouring stage has the code `neighbour`,
// -1 for none.
inline int Code(int type, int neighbour, int types) {
  return type == neighbour ? types + type : type;
}

struct Problem {
  int layers = 0, types = 0;
  // [layers, types], row-major.
  std::vector<double> compute_serial, compute_parallel, sync_serial, sync_parallel;
  std::vector<double> transfer_serial, transfer_parallel, memory;
  std::vector<uint8_t> allowed;
  std::vector<double> forward_share;  // of compute
  std::vector<double> held;           // of memory, for each micro-batch in flight
  std::vector<double> delay;          // seconds a sample from a step's sum to its update
  std::vector<double> most_units;     // of a stage with the layer
  std::vector<double> far;            // seconds a sample of sums besides, among several hosts
  std::vector<uint8_t> joined;        // [layers]: in one stage with the layer before
  // Whether neighbouring stages may be on one type, where together they exceed its memory.
  bool cuts = false;
  std::vector<double> price, limit, capacity;  // [types]
  std::vector<double> near;                    // [types]: units on one host
  double samples = 1, ps_core_s = 0, max_price = kInf;
  int ps_type = 0;
  // Of a step: its samples, its micro-batches and the updates that it lacks. Where there are no
  // micro-batches, what counts is the slowest stage alone.
  double batch = 0;
  int micro_batches = 0, staleness = 0;
  bool whole_batch = false;  // whether its loss is one of whole batches
  bool lockstep = false;     // whether workers share out experts
  double crossing = 0;  // seconds of a micro-batch to another stage and back, besides transfers
  // [layers, types]: s of a micro-batch that a worker is busy with what passes behind the layer,
  // in stages that end with it and in those that begin after it.
  std::vector<double> handled;

  // Whether a stage may have so many units: of workers that share out experts each has as many
  // micro-batches.
  bool Deals(double units) const {
    return !lockstep || micro_batches % static_cast<int>(units) == 0;
  }
  size_t At(int layer, int type) const { return static_cast<size_t>(layer) * types + type; }
  // Whether a stage may end with `layer`.
  bool Ends(int layer) const { return layer + 1 == layers || !joined[layer + 1]; }
  bool Usable(int layer, int type) const {
    return allowed[At(layer, type)] && memory[At(layer, type)] <= capacity[type];
  }

  // Adds `layer` to the run `terms` on `type`: its transfer replaces that of the layer before.
  void Extend(Terms* terms, int layer, int type) const {
    size_t at = At(layer, type);
    terms->cs += compute_serial[at];
    terms->cp += compute_parallel[at];
    terms->fs += compute_serial[at] * forward_share[at];
    terms->fp += compute_parallel[at] * forward_share[at];
    terms->ds += sync_serial[at];
    terms->dp += sync_parallel[at];
    terms->memory += memory[at];
    terms->held += held[at];
    terms->delay += delay[at];
    terms->far += far[at];
    terms->near = near[type];
    terms->most = std::min(terms->most, most_units[at]);
    bool final = layer == layers - 1;
    terms->ts = final ? 0 : transfer_serial[at];
    terms->tp = final ? 0 : transfer_parallel[at];
    terms->way = final ? 0 : crossing;
    if (terms->first < 0) terms->first = layer;
    terms->handled =
        (terms->first > 0 ? handled[At(terms->first - 1, type)] : 0) + (final ? 0 : handled[at]);
  }

  // Bytes of a stage's unit, with all that may be in flight.
  double Whole(const Terms& terms) const {
    return terms.memory + std::max(0, micro_batches * (staleness + 1) - 1) * terms.held;
  }
  // Whether neighbours on `type` exceed its memory together; else they are one stage.
  bool Apart(double one, double other, int type) const { return one + other > capacity[type]; }
  bool Apart(const Terms& one, const Terms& other, int type) const {
    return Apart(Whole(one), Whole(other), type);
  }

  // Whether the run `terms` on `type` must be cut before `layer`, as it would not fit with the
  // layers that may not be parted from it.
  bool Overflows(const Terms& terms, int layer, int type) const {
    if (!cuts) return false;
    double bytes = terms.memory + memory[At(layer, type)];
    while (!Ends(layer)) bytes += memory[At(++layer, type)];
    return bytes > capacity[type];
  }

  // Samples/s where the slowest stage takes `tau`; just below `floor` is the floor.
  double Rate(double tau, double floor) const {
    double rate = 1 / tau;
    return rate < floor && rate >= floor * (1 - kTolerance) ? floor : rate;
  }
  double PsUnits(double rate) const { return std::ceil(rate * ps_core_s); }
};

}  // namespace heterps::scheduler
