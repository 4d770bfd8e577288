// A problem at one pace: what each stage needs to take at most tau seconds a sample.
#pragma once

#include <memory>
#include <vector>

#include "policy/features.h"
#include "problem/problem.h"

namespace heterps::scheduler {

// The cheapest ways to finish from each layer, where a unit of type t costs weight[t].
//
// on[l, t] starts a stage on t at layer l; off[l, t] starts one on any other type, and is what
// follows a stage on t. `use_*` are the units of each type that this way takes. Where the problem
// has cuts a stage on t may follow, too, if both exceed its memory together: `again` has the ways
// that start so, by the bytes of their first stage, each the cheapest of those with so many or
// more.
struct Finish {
  struct Again {
    double bytes, cost;
    size_t use;  // where its units are in `use_again`
  };

  std::vector<double> weight;
  std::vector<double> on, off;            // [layers + 1, types]
  std::vector<float> use_on, use_off;     // [layers + 1, types, types]
  std::vector<std::vector<Again>> again;  // [layers + 1, types], or none
  std::vector<float> use_again;
};

class Pace {
 public:
  // `floor` is the throughput to keep, samples/s; `nodes` bounds the search for a plan that keeps
  // it where limits shared by stages are tight, and with it the effort of the look-ahead.
  Pace(std::shared_ptr<const Problem> problem, double floor, int nodes, double shadow = 0);
  Pace(const Pace&) = delete;
  Pace& operator=(const Pace&) = delete;

  const Problem& problem() const { return *problem_; }
  double tau() const { return tau_; }
  double floor() const { return floor_; }
  // Units of each type left for stages, the parameter server's taken off, [types].
  const std::vector<double>& left() const { return left_; }
  // A price an hour to compare with: what the layers' cheapest fractions of units cost together.
  double reference() const { return reference_; }
  // The price an hour of a unit of each type as the policy sees it, [types].
  const std::vector<double>& seen() const { return seen_; }
  const std::vector<float>& features() const {
    return features_;
  }  // [layers, types, kLayerFeatures]

  // Whether some assignment keeps the pace within the limits.
  bool Feasible() const { return feasible_; }
  // Least price an hour at this pace (parameter server included), limits shared by stages
  // ignored: a lower bound. `guided` has them priced in: the cheapest kept by this pace.
  double LeastPrice() const;
  double GuidedPrice() const { return guided_price_; }
  // What follows in it a stage `terms` on `type` that ends with the layer `last`.
  double Guided(const Terms& terms, int last, int type) const {
    return After(guide(), terms, last, type).cost;
  }
  const Finish& guide() const {
    return guided_price_ == kInf && dual_ ? *dual_ : *finishes_[guide_];
  }

  // Whether a stage `terms` on `type` and one of `beside` bytes before it are two.
  bool Parted(double beside, const Terms& terms, int type) const {
    return beside == kInf || problem_->Apart(beside, problem_->Whole(terms), type);
  }

  // How many layers from `layer` on the run `terms` on `type` can take in without needing more
  // than `units`; `terms` is without them.
  int Reach(int layer, int type, Terms terms, double units) const;

  // Whether layers from `layer` on can be finished with `used` units of each type gone: after a
  // run of `run` on `type` that goes on, when `goes_on`, else by a stage that starts on `type`.
  // `beside` are the bytes of the stage before this one where it is on the same type, infinite
  // where it is not: together they have to exceed its memory.
  //
  // A yes comes with a way to finish that stays known, so that whoever follows a yes never ends
  // where nothing is possible. Where limits shared by stages are so tight that no way is found
  // with a bounded effort, the answer is no.
  bool CanFinish(int layer, int type, const Terms& run, bool goes_on, const double* used,
                 double beside = kInf) const;

 private:
  // How a state can be finished: by which layer the stage on `type` ends, and the units it takes.
  struct State {
    int layer, type;
    const Terms& run;
    bool goes_on;
    const double* used;
    double beside;
  };
  enum class Answer { kNo, kYes, kUnknown };

  struct Rest {
    double cost;
    const float* use;
  };

  Finish Solve(const std::vector<double>& weight) const;
  Rest After(const Finish& finish, const Terms& terms, int last, int type) const;
  Answer Known(const Finish& finish, const State& state, float* use) const;
  bool Learn(const State& state) const;
  void Describe();
  void FindGuide();
  bool Fits(const double* used, const float* more) const;
  bool Search(const State& state, double* used, std::vector<int32_t>* path) const;
  bool SearchNext(int layer, int before, double bytes, double* used,
                  std::vector<int32_t>* path) const;
  bool Follow(const State& state, const std::vector<int32_t>& path) const;
  bool Hopeless(int layer, int type, bool on, bool off, const double* used) const;
  const std::vector<Finish>& Least() const;

  std::shared_ptr<const Problem> problem_;
  double floor_, tau_;
  std::vector<double> left_;
  double reference_ = 0;
  std::vector<double> seen_;
  std::vector<float> features_;
  mutable std::vector<std::unique_ptr<Finish>> finishes_;  // the first: least price
  // Ends found by search: a layer's type, with cuts as `Split` has them, or -1.
  mutable std::vector<std::vector<int32_t>> paths_;
  int nodes_;
  // Effort that the look-ahead may still take.
  mutable int solves_left_, searches_left_, nodes_left_;
  size_t guide_ = 0;
  double guided_price_ = kInf;
  bool feasible_ = false;
  std::unique_ptr<Finish> dual_;       // whose weights make the limits look tightest
  double dual_left_ = 0;               // what the limits are worth by those weights
  mutable std::vector<Finish> least_;  // weight 1 on one type each, made when first needed
};

}  // namespace heterps::scheduler
