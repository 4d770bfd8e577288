// Plans drawn from the policy bit by bit anew.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy/network.h"
#include "policy/pace.h"

namespace heterps::scheduler {

struct ReviseSettings {
  int trials, window;  // windows drawn for each plan, and the most layers of one
  float temperature;   // of the draws, on average
  double heat;         // how much dearer a plan to go on from may be at first, relative
  double slack;        // above 1: limits may be overdrawn by this factor on the way
  double floor;        // throughput that simulated steps are to reach, samples/s
};

// Large neighbourhood search (Shaw 1998) with the policy as the one who rebuilds: again and again
// some layers of a plan are forgotten, drawn anew by the policy and kept if the plan got cheaper at
// its pace, with simulated annealing's chance if it got a little dearer. The forgotten layers are
// one or two windows, or one to three whole stages. With slack, plans may pass through states that
// overdraw limits, for a fine that rises as long as they do (adaptive penalties).
//
// Where what counts is the simulated time of a flushed step, plans are drawn at their paces all the
// same, but kept by that time and what the units for it cost (`StepUnits`); they may pass through
// states that miss floor, limits or cap.
//
// `assignments` [paces, layers]; returns the ever cheaper plans within the limits, [n, layers].
// The same seed draws the same.
std::vector<int32_t> Revise(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            const int32_t* assignments, const ReviseSettings& settings,
                            uint64_t seed);

}  // namespace heterps::scheduler
