// What the layers before a boundary cost at least, and the time of a micro-batch through them.
#pragma once

#include <cstdint>
#include <vector>

#include "exact/step_spans.h"

namespace heterps::scheduler {

class StepBefore {
 public:
  // `ending` [layers + 1] has the spans by the boundary after their last layer; `slack` is the most
  // seconds a sample. With `fastest` nothing is priced; `coarse` prices at fewer paces.
  StepBefore(const Problem& problem, const std::vector<Span>& spans,
             const std::vector<std::vector<int32_t>>& ending, double slack, bool fastest,
             bool coarse);

  // Seconds a sample that a stage takes at least, of which a step has so many in a row.
  double Floor(const Span& span, double units) const;

  // A value (seconds a sample * price an hour) that the layers before the boundary `at`, followed
  // by a stage on `type`, have at least in any plan that takes `tau` seconds a sample or more.
  double Price(double tau, int at, int type) const;

  // Seconds that a micro-batch takes at least through the layers before `at`, there and back.
  double Trip(int at) const { return trip_[at]; }

 private:
  // Units; infinite where no number is enough.
  double Fewest(const Span& span, double tau) const;

  const Problem& problem_;
  const std::vector<Span>& spans_;
  double cheapest_;
  double low_, ratio_;          // the fastest pace, and between one and the next
  int paces_;                   // at which layers are priced
  std::vector<double> prices_;  // [paces + 1, layers + 1, types], for all slower paces, too
  std::vector<double> trip_;    // [layers + 1]
};

}  // namespace heterps::scheduler
