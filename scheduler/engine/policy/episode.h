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
  int type() const { return type_; }                                   // of the last layer placed
  bool cut() const { return beside_ < kInf && first_ + 1 == layer_; }  // whether that was cut off
  // The types, with cuts as `Split` has them.
  const std::vector<int32_t>& assignment() const { return assignment_; }

  // Which types the next layer may go to: those from which the pace can still be kept within
  // memory and limits. All zero only where the whole problem cannot keep it.
  void Mask(uint8_t* mask) const;
  // Which types have room for the next layer, whatever comes after it, where `slack` times the
  // limits may be taken.
  void Room(uint8_t* mask, double slack) const;
  // Whether the next layer may begin another stage on the type of the current one, which it may
  // lengthen, too; `MayCut` with the pace still to be kept, `RoomToCut` whatever comes after it.
  bool MayCut() const;
  bool RoomToCut(double slack) const;
  // Features of the state for each type, [types, kStateFeatures]; of masked types only that they
  // are.
  void Observe(const uint8_t* mask, float* features) const;
  // Those of another stage on the current type, [kStateFeatures].
  void ObserveCut(float* features) const;
  // What the cheapest way to finish costs an hour for each type (limits priced in), [types]. The
  // teacher's values: used to warm-start training, never in planning.
  void Teach(const uint8_t* mask, double* values) const;
  void Step(int type);
  void Cut();
  // Places the next layer where `assignment` has it, parted from the one before as there.
  void Keep(const int32_t* assignment);
  // Price an hour of the complete assignment at this pace, the parameter server included.
  // Infinite where it does not keep the limits.
  double Price() const;
  // The same with limits that may be overdrawn: `fine` is the price of a unit beyond each, [types];
  // `fits` says whether none is.
  double Price(const std::vector<double>& fine, bool* fits) const;

 private:
  bool GoesOn(int type) const;
  bool Apart() const { return pace_->Parted(beside_, run_, type_); }
  bool Parts() const;
  void Begin(int type, int code, double beside);
  void Append();
  // Prices an hour: of the stages that ended, with the current one without its last transfer, of
  // its ending now, and what it then costs more.
  struct Standing {
    double spent = 0, before = 0, closing = 0, drop = 0;
  };
  Standing Stand() const;
  void Observe(const Standing& now, int type, bool same, float* features) const;

  std::shared_ptr<const Pace> pace_;
  int layer_ = 0;
  int type_ = -1;             // of the current stage
  int code_ = -1;             // what stands for it in the assignment
  int first_ = 0;             // its first layer
  Terms run_;                 // its terms
  double beside_ = kInf;      // bytes of the stage that it was cut from
  std::vector<double> used_;  // units of the stages that ended
  double spent_ = 0;          // what those cost an hour
  std::vector<int32_t> assignment_;
};

}  // namespace heterps::scheduler
