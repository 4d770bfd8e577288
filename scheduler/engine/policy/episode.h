// One episode of the placement environment: layers placed one after the other at one pace.
#pragma once

#include <memory>
#include <vector>

#include "policy/pace.h"

namespace heterps::scheduler {

class Episode {
 public:
  explicit Episode(std::shared_ptr<const Pace> pace);

  const Pace& pace() const { return *pace_; }
  int layer() const { return layer_; }
  bool done() const { return layer_ == pace_->problem().layers; }
  const std::vector<int32_t>& assignment() const { return assignment_; }

  // Which types the next layer may go to: those from which the pace can still be kept within
  // memory and limits. All zero only where the whole problem cannot keep it.
  void Mask(uint8_t* mask) const;
  // Which types have room for the next layer, whatever comes after it, where `slack` times the
  // limits may be taken.
  void Room(uint8_t* mask, double slack) const;
  // Features of the state for each type, [types, kStateFeatures]; of masked types only that they
  // are.
  void Observe(const uint8_t* mask, float* features) const;
  // What the cheapest way to finish costs an hour for each type (limits priced in), [types]. The
  // teacher's values: used to warm-start training, never in planning.
  void Teach(const uint8_t* mask, double* values) const;
  void Step(int type);
  // Price an hour of the complete assignment at this pace, the parameter server included.
  // Infinite where it does not keep the limits.
  double Price() const;
  // The same with limits that may be overdrawn: `fine` is the price of a unit beyond each, [types];
  // `fits` says whether none is.
  double Price(const std::vector<double>& fine, bool* fits) const;

 private:
  bool GoesOn(int type) const;

  std::shared_ptr<const Pace> pace_;
  int layer_ = 0;
  int type_ = -1;             // of the current stage
  int first_ = 0;             // its first layer
  Terms run_;                 // its terms
  std::vector<double> used_;  // units of the stages that ended
  double spent_ = 0;          // what those cost an hour
  std::vector<int32_t> assignment_;
};

}  // namespace heterps::scheduler
