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

// Whether the next layer may be parted from the current stage, which it fits in.
bool Episode::Parts() const {
  const Problem& p = pace_->problem();
  return p.cuts && type_ >= 0 && !done() && !p.joined[layer_] && GoesOn(type_) && Apart() &&
         p.allowed[p.At(layer_, type_)];
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
      mask[t] = pace_->CanFinish(layer_, t, run_, true, used_.data(), beside_);
    } else {
      if (type_ >= 0) {
        if (!Apart() || used_[type_] + closing > pace_->left()[type_]) continue;
        used[type_] = used_[type_] + closing;
      }
      mask[t] = pace_->CanFinish(layer_, t, {}, false, used.data());
      if (type_ >= 0) used[type_] = used_[type_];
    }
  }
}

bool Episode::MayCut() const {
  if (!Parts()) return false;
  std::vector<double> used(used_);
  used[type_] += run_.Units(pace_->tau());
  return used[type_] <= pace_->left()[type_] &&
         pace_->CanFinish(layer_, type_, {}, false, used.data(), pace_->problem().Whole(run_));
}

bool Episode::RoomToCut(double slack) const {
  if (!Parts()) return false;
  const Problem& p = pace_->problem();
  Terms terms;
  p.Extend(&terms, layer_, type_);
  double units = run_.Units(pace_->tau()) + Bare(terms).Units(pace_->tau());
  return terms.memory <= p.capacity[type_] && used_[type_] + units <= pace_->left()[type_] * slack;
}

void Episode::Room(uint8_t* mask, double slack) const {
  const Problem& p = pace_->problem();
  double closing = type_ < 0 ? 0 : run_.Units(pace_->tau());
  bool leaves = type_ < 0 || (Apart() && used_[type_] + closing <= pace_->left()[type_] * slack);
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
  Standing now = Stand();
  for (int t = 0; t < pace_->problem().types; ++t) {
    float* f = features + static_cast<size_t>(t) * kStateFeatures;
    if (mask[t]) {
      Observe(now, t, GoesOn(t), f);
    } else {  // looks no further at what cannot be taken
      std::fill(f, f + kStateFeatures, 0.0F);
      f[is::allowed] = -1.0F;
    }
  }
}

void Episode::ObserveCut(float* features) const { Observe(Stand(), type_, false, features); }

Episode::Standing Episode::Stand() const {
  const std::vector<double>& price = pace_->seen();
  Standing now;
  for (size_t t = 0; t < price.size(); ++t) now.spent += used_[t] * price[t];
  now.before = now.spent;
  if (type_ >= 0) {
    double open = std::min(Bare(run_).Units(pace_->tau()), 1e9);
    double closing = std::min(run_.Units(pace_->tau()), 1e9);
    now.closing = closing * price[type_];
    now.drop = (closing - open) * price[type_];
    now.before += open * price[type_];
  }
  return now;
}

// Of the next layer on type `t`, where the current stage goes on with it (`same`) or it begins one.
void Episode::Observe(const Standing& now, int t, bool same, float* f) const {
  namespace is = state_feature;
  const Problem& p = pace_->problem();
  const std::vector<double>& price = pace_->seen();
  double tau = pace_->tau(), reference = pace_->reference();
  std::fill(f, f + kStateFeatures, 0.0F);
  f[is::allowed] = 1.0F;
  Terms terms = same ? run_ : Terms();
  p.Extend(&terms, layer_, t);
  Terms bare = Bare(terms);
  double fraction = bare.Fraction(tau), units = bare.Units(tau);
  double ending = terms.Units(tau);
  bool able = units < kInf;
  double after = now.spent + (same ? 0 : now.closing) + (able ? units : 1e9) * price[t];
  double taken = used_[t] + (able ? units : 0);
  f[is::current_stage] = same ? 1.0F : 0.0F;
  f[is::added_price] = Share(after - now.before, reference);
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
  f[is::leaving_price] = Share(now.drop, reference);
  f[is::spent] = Share(now.spent, reference);
  if (able) {
    // Layers after this one that come for free, as the units at hand take them in too.
    int reach = pace_->Reach(layer_ + 1, t, bare, units);
    f[is::reach] = static_cast<float>(std::log10(1.0 + reach) / 2);
    f[is::reach_share] = static_cast<float>(reach + 1) / (p.layers - layer_);
  }
  f[is::stage_length] =
      type_ < 0 ? -1.0F : static_cast<float>(std::log10(layer_ - first_ + 1.0) / 2);
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
  if (!GoesOn(type)) Begin(type, type == type_ ? code_ : type, kInf);
  Append();
}

void Episode::Cut() {
  const Problem& p = pace_->problem();
  Begin(type_, Code(type_, code_, p.types), p.Whole(run_));
  Append();
}

void Episode::Keep(const int32_t* assignment) {
  const Problem& p = pace_->problem();
  int type = p.joined[layer_] ? type_ : assignment[layer_] % p.types;
  bool cut = layer_ > 0 && assignment[layer_ - 1] != assignment[layer_] &&
             assignment[layer_ - 1] % p.types == type;
  if (cut && type == type_ && Parts()) {
    Cut();
  } else {
    Step(type);
  }
}

// Ends the current stage and begins one with the next layer.
void Episode::Begin(int type, int code, double beside) {
  const Problem& p = pace_->problem();
  if (type_ >= 0) {
    bool able = run_.memory <= p.capacity[type_] && Apart();
    double units = able ? run_.Units(pace_->tau()) : kInf;
    used_[type_] += units;
    spent_ += units * p.price[type_];
  }
  run_ = Terms();
  beside_ = beside;
  first_ = layer_;
  type_ = type;
  code_ = code;
}

// Places the next layer in the current stage.
void Episode::Append() {
  pace_->problem().Extend(&run_, layer_, type_);
  assignment_.push_back(code_);
  ++layer_;
}

double Episode::Price(const std::vector<double>& fine, bool* fits) const {
  const Problem& p = pace_->problem();
  *fits = false;
  if (!done() || run_.memory > p.capacity[type_] || !Apart()) return kInf;
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
