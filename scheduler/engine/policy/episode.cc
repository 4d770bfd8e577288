#include "policy/episode.h"

namespace heterps::scheduler {
namespace {

// Money as a share of the reference, resolved finely near zero.
float Share(double money, double reference) {
  double x = std::clamp(money / reference, -100.0, 100.0);
  return static_cast<float>(std::copysign(std::log1p(std::abs(x) * 50), x) / 4);
}

float Count(double units) { return static_cast<float>(std::log10(1 + std::min(units, 1e6)) / 3); }

Terms Bare(Terms terms) {
  terms.ts = terms.tp = 0;
  return terms;
}

}  // namespace

Episode::Episode(std::shared_ptr<const Pace> pace)
    : pace_(std::move(pace)), used_(pace_->problem().types, 0.0) {
  assignment_.reserve(pace_->problem().layers);
}

// Whether placing the next layer on `type` lengthens the current stage.
bool Episode::GoesOn(int type) const {
  const Problem& p = pace_->problem();
  return type == type_ && (p.joined[layer_] || !p.Overflows(run_, layer_, type));
}

void Episode::Mask(uint8_t* mask) const {
  const Problem& p = pace_->problem();
  std::fill(mask, mask + p.types, 0);
  if (done()) return;
  std::vector<double> used(used_);
  double closing = type_ < 0 ? 0 : run_.Units(pace_->tau());
  for (int t = 0; t < p.types; ++t) {
    if (!p.allowed[p.At(layer_, t)] || (p.joined[layer_] && t != type_)) continue;
    if (GoesOn(t)) {
      mask[t] = pace_->CanFinish(layer_, t, run_, true, used_.data());
    } else {
      if (type_ >= 0) {
        if (used_[type_] + closing > pace_->left()[type_]) continue;
        used[type_] = used_[type_] + closing;
      }
      mask[t] = pace_->CanFinish(layer_, t, {}, false, used.data());
      if (type_ >= 0) used[type_] = used_[type_];
    }
  }
}

void Episode::Room(uint8_t* mask, double slack) const {
  const Problem& p = pace_->problem();
  double closing = type_ < 0 ? 0 : run_.Units(pace_->tau());
  bool leaves = type_ < 0 || used_[type_] + closing <= pace_->left()[type_] * slack;
  for (int t = 0; t < p.types; ++t) {
    mask[t] = 0;
    bool same = GoesOn(t);
    if (!p.allowed[p.At(layer_, t)] || (!same && (!leaves || p.joined[layer_]))) continue;
    Terms terms = same ? run_ : Terms();
    p.Extend(&terms, layer_, t);
    if (terms.memory > p.capacity[t]) continue;
    mask[t] = used_[t] + Bare(terms).Units(pace_->tau()) <= pace_->left()[t] * slack;
  }
}

void Episode::Observe(const uint8_t* mask, float* features) const {
  namespace is = state_feature;
  const Problem& p = pace_->problem();
  const std::vector<double>& price = pace_->seen();
  double spent = 0;
  for (int t = 0; t < p.types; ++t) spent += used_[t] * price[t];
  double tau = pace_->tau(), reference = pace_->reference();
  double open = 0, closing = 0, drop = 0;
  if (type_ >= 0) {
    open = Bare(run_).Units(tau);
    closing = run_.Units(tau);
    drop = (std::min(closing, 1e9) - std::min(open, 1e9)) * price[type_];
  }
  double before = spent + (type_ >= 0 ? std::min(open, 1e9) * price[type_] : 0);
  for (int t = 0; t < p.types; ++t) {
    float* f = features + static_cast<size_t>(t) * kStateFeatures;
    std::fill(f, f + kStateFeatures, 0.0F);
    f[is::allowed] = mask[t] ? 1.0F : -1.0F;
    if (!mask[t]) {  // looks no further at what cannot be taken
      continue;
    }
    bool same = GoesOn(t);
    Terms terms = same ? run_ : Terms();
    p.Extend(&terms, layer_, t);
    Terms bare = Bare(terms);
    double fraction = bare.Fraction(tau), units = bare.Units(tau);
    double ending = terms.Units(tau);
    bool able = units < kInf;
    double after = spent + (same || type_ < 0 ? 0 : std::min(closing, 1e9) * price[type_]) +
                   (able ? units : 1e9) * price[t];
    double taken = used_[t] + (able ? units : 0);
    f[is::current_stage] = same ? 1.0F : 0.0F;
    f[is::added_price] = Share(after - before, reference);
    f[is::spare_units] =
        able ? static_cast<float>(units - std::max(fraction, 0.0)) : 0.0F;  // spare part of a unit
    f[is::spare_price] = able ? Share((units - fraction) * price[t], reference) : 0.0F;
    f[is::units] = able ? Count(units) : 3.0F;
    f[is::serial_share] = static_cast<float>(std::min(std::max(bare.cs, bare.ds) / tau, 2.0));
    f[is::memory_share] =
        static_cast<float>(std::min(terms.memory / std::max(p.capacity[t], 1e-300), 2.0));
    f[is::units_share] = static_cast<float>(std::min(taken / std::max(pace_->left()[t], 0.1), 2.0));
    f[is::type_used] = static_cast<float>(used_[t] > 0);
    f[is::ending_price] =
        ending < kInf && able ? Share((ending - units) * price[t], reference) : 3.0F;
    f[is::leaving_price] = Share(drop, reference);
    f[is::spent] = Share(spent, reference);
    if (able) {
      // Layers after this one that come for free, as the units at hand take them in too.
      int reach = pace_->Reach(layer_ + 1, t, bare, units);
      f[is::reach] = static_cast<float>(std::log10(1.0 + reach) / 2);
      f[is::reach_share] = static_cast<float>(reach + 1) / (p.layers - layer_);
    }
    f[is::stage_length] =
        type_ < 0 ? -1.0F : static_cast<float>(std::log10(layer_ - first_ + 1.0) / 2);
  }
}

void Episode::Teach(const uint8_t* mask, double* values) const {
  const Problem& p = pace_->problem();
  const Finish& guide = pace_->guide();
  double tau = pace_->tau();
  double closing = type_ < 0 ? 0 : run_.Units(tau);
  double base = spent_ + p.PsUnits(pace_->floor()) * p.price[p.ps_type];
  for (int t = 0; t < p.types; ++t) {
    values[t] = kInf;
    if (!mask[t]) continue;
    if (!GoesOn(t)) {
      double before = type_ < 0 ? 0 : closing * guide.weight[type_];
      values[t] = base + before + guide.on[p.At(layer_, t)];
      continue;
    }
    Terms terms = run_;
    for (int last = layer_; last < p.layers; ++last) {
      if (!p.allowed[p.At(last, t)]) break;
      p.Extend(&terms, last, t);
      if (terms.memory > p.capacity[t] || terms.cs > tau || terms.ds > tau) break;
      if (!p.Ends(last)) continue;
      double units = terms.Units(tau);
      if (used_[t] + units > pace_->left()[t]) continue;
      double value = base + units * guide.weight[t] + pace_->Guided(terms, last, t);
      values[t] = std::min(values[t], value);
    }
  }
}

void Episode::Step(int type) {
  const Problem& p = pace_->problem();
  if (!GoesOn(type)) {
    if (type_ >= 0) {
      double units = run_.memory <= p.capacity[type_] ? run_.Units(pace_->tau()) : kInf;
      used_[type_] += units;
      spent_ += units * p.price[type_];
    }
    run_ = Terms();
    first_ = layer_;
    type_ = type;
  }
  p.Extend(&run_, layer_, type);
  assignment_.push_back(type);
  ++layer_;
}

double Episode::Price(const std::vector<double>& fine, bool* fits) const {
  const Problem& p = pace_->problem();
  *fits = false;
  if (!done() || run_.memory > p.capacity[type_]) return kInf;
  double units = run_.Units(pace_->tau());
  double price = spent_ + units * p.price[type_] + p.PsUnits(pace_->floor()) * p.price[p.ps_type];
  *fits = price < kInf;
  for (int t = 0; t < p.types; ++t) {
    double over = used_[t] + (t == type_ ? units : 0) - pace_->left()[t];
    if (over > 0) *fits = false, price += over * fine[t];
  }
  return price;
}

double Episode::Price() const {
  bool fits = false;
  double price = Price(std::vector<double>(pace_->problem().types, 0.0), &fits);
  return fits ? price : kInf;
}

}  // namespace heterps::scheduler
