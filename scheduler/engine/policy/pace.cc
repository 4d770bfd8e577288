#include "policy/pace.h"

namespace heterps::scheduler {
namespace {

constexpr int kRounds = 40;  // of multiplicative weights, to find a plan within the limits
constexpr int kPolish = 8;   // of them after the first such plan, to find cheaper ones

float Log10(double value, double low, double high) {
  if (!(value > 0)) return static_cast<float>(low / std::max(-low, high));
  return static_cast<float>(std::clamp(std::log10(value), low, high) / std::max(-low, high));
}

}  // namespace

Pace::Pace(std::shared_ptr<const Problem> problem, double floor, int nodes, double shadow)
    : problem_(std::move(problem)),
      floor_(floor),
      tau_(1 / (floor * (1 - kTolerance))),
      nodes_(nodes),
      solves_left_(nodes / 6000),
      searches_left_(nodes / 1000),
      nodes_left_(nodes) {
  left_ = problem_->limit;
  left_[problem_->ps_type] -= problem_->PsUnits(floor);
  FindGuide();
  seen_ = problem_->price;
  if (shadow > 0) {
    const std::vector<double>& weight = guide().weight;
    for (size_t t = 0; t < seen_.size(); ++t) {
      double listed = std::max(seen_[t], 1e-12), priced = std::max(weight[t], 1e-12);
      seen_[t] = std::pow(listed, 1 - shadow) * std::pow(priced, shadow);
    }
  }
  Describe();
}

// The cheapest that may follow a stage `terms` on `type` that ends with the layer `last`.
Pace::Rest Pace::After(const Finish& finish, const Terms& terms, int last, int type) const {
  const Problem& p = *problem_;
  size_t at = p.At(last + 1, type);
  Rest rest{finish.off[at], &finish.use_off[at * p.types]};
  if (!p.cuts) return rest;
  const auto& again = finish.again[at];
  double bytes = p.Whole(terms);
  auto apart = std::partition_point(again.begin(), again.end(), [&](const Finish::Again& one) {
    return !p.Apart(bytes, one.bytes, type);
  });
  if (apart == again.end() || !(apart->cost < rest.cost)) return rest;
  return {apart->cost, &finish.use_again[apart->use]};
}

Finish Pace::Solve(const std::vector<double>& weight) const {
  const Problem& p = *problem_;
  int layers = p.layers, types = p.types;
  Finish f;
  f.weight = weight;
  f.on.assign(static_cast<size_t>(layers + 1) * types, kInf);
  f.off.assign(f.on.size(), kInf);
  f.use_on.assign(f.on.size() * types, 0);
  f.use_off.assign(f.on.size() * types, 0);
  std::fill(f.off.end() - types, f.off.end(), 0.0);
  if (p.cuts) f.again.resize(f.on.size());
  for (int first = layers - 1; first >= 0; --first) {
    for (int type = 0; type < types; ++type) {
      Terms terms;
      double best = kInf;
      std::vector<float> use(types, 0);
      std::vector<Finish::Again>* again = p.cuts ? &f.again[p.At(first, type)] : nullptr;
      for (int last = first; last < layers; ++last) {
        if (!p.allowed[p.At(last, type)]) break;
        p.Extend(&terms, last, type);
        // What cannot shrink by going on: memory, and the time without the transfer.
        if (terms.memory > p.capacity[type] || terms.cs > tau_ || terms.ds > tau_) break;
        if (!p.Ends(last)) continue;
        double units = terms.Units(tau_);
        if (units > left_[type]) {
          Terms bare = terms;
          bare.ts = bare.tp = 0;
          if (bare.Units(tau_) > left_[type]) break;
          continue;
        }
        Rest rest = After(f, terms, last, type);
        double value = weight[type] * units + rest.cost;
        if (!(value < best) && !(again && value < kInf)) continue;
        std::copy_n(rest.use, types, use.begin());
        use[type] += static_cast<float>(units);
        if (again) {
          again->push_back({p.Whole(terms), value, f.use_again.size()});
          f.use_again.insert(f.use_again.end(), use.begin(), use.end());
        }
        if (value < best) {
          best = value;
          std::copy(use.begin(), use.end(), &f.use_on[p.At(first, type) * types]);
        }
      }
      f.on[p.At(first, type)] = best;
      for (size_t n = again ? again->size() : 0; n-- > 1;) {
        const Finish::Again& larger = (*again)[n];
        Finish::Again& one = (*again)[n - 1];
        if (larger.cost <= one.cost) one.cost = larger.cost, one.use = larger.use;
      }
    }
    // The best and the second best type to start on serve every type to come from.
    int one = -1, two = -1;
    for (int type = 0; type < types; ++type) {
      double value = f.on[p.At(first, type)];
      if (one < 0 || value < f.on[p.At(first, one)]) {
        two = one, one = type;
      } else if (two < 0 || value < f.on[p.At(first, two)]) {
        two = type;
      }
    }
    for (int type = 0; type < types; ++type) {
      int next = type == one ? two : one;
      if (next < 0) continue;
      size_t at = p.At(first, type), from = p.At(first, next);
      f.off[at] = f.on[from];
      std::copy_n(&f.use_on[from * types], types, &f.use_off[at * types]);
    }
  }
  return f;
}

double Pace::LeastPrice() const {
  const Finish& f = *finishes_[0];
  double least = *std::min_element(f.on.begin(), f.on.begin() + problem_->types);
  return least + problem_->PsUnits(floor_) * problem_->price[problem_->ps_type];
}

// Prices in the limits that stages share: moves the weight of each type by how far the cheapest
// way overdraws its limit, in ever smaller steps (multiplicative weights). Ends early with a proof
// that nothing keeps the limits: for any weights, a way that does costs at most what the limits do.
void Pace::FindGuide() {
  const Problem& p = *problem_;
  int types = p.types;
  if (left_[p.ps_type] < 0) {
    finishes_.push_back(std::make_unique<Finish>(Solve(p.price)));
    return;
  }
  double mean = 0;
  for (double price : p.price) mean += price / types;
  std::vector<double> weight = p.price, none(types, 0.0);
  int since = 0;  // rounds after the first way within the limits
  double tightest = -1;
  for (int round = 0; round < kRounds && since < kPolish; ++round) {
    Finish f = Solve(weight);
    int first =
        static_cast<int>(std::min_element(f.on.begin(), f.on.begin() + types) - f.on.begin());
    double least = f.on[first];
    double most = 0;
    for (int t = 0; t < types; ++t) most += weight[t] * left_[t];
    std::vector<float> use(f.use_on.begin() + static_cast<size_t>(first) * types,
                           f.use_on.begin() + static_cast<size_t>(first + 1) * types);
    bool fits = least < kInf && Fits(none.data(), use.data());
    if (!fits && least < kInf && least / most > tightest) {
      tightest = least / most;
      dual_ = std::make_unique<Finish>(f);
      dual_left_ = most;
    }
    if (fits) {
      double price = p.PsUnits(floor_) * p.price[p.ps_type];
      for (int t = 0; t < types; ++t) price += use[t] * p.price[t];
      if (price < guided_price_) {
        guided_price_ = price;
        guide_ = finishes_.size();
        finishes_.push_back(std::make_unique<Finish>(std::move(f)));
      }
      feasible_ = true;
    } else if (round == 0) {
      finishes_.push_back(std::make_unique<Finish>(std::move(f)));
    }
    since += feasible_;
    if (!(least <= most * (1 + 1e-9)) || (fits && round == 0)) break;
    double step = 1.0 / (1 + round / 10.0);
    bool moved = false;
    for (int t = 0; t < types; ++t) {
      double over = use[t] / std::max(left_[t], 1e-9);
      if (over <= 1 && weight[t] <= p.price[t]) continue;
      double factor = std::clamp(std::pow(std::max(over, 0.3), step), 0.5, 3.0);
      // Exactly at the limit counts as a little too much: a stage more would not fit.
      if (over > 1) factor *= 1.01;
      weight[t] = std::max({weight[t], 1e-3 * mean, 1e-12}) * factor;
      weight[t] = std::max(weight[t], p.price[t]);
      moved = true;
    }
    if (!moved) break;
  }
  if (!feasible_ && LeastPrice() < kInf && tightest <= 1 + 1e-9) {
    std::vector<double> used(types, 0.0);
    std::vector<int32_t> path(p.layers, -1);
    feasible_ = SearchNext(0, -1, kInf, used.data(), &path);
    if (feasible_) paths_.push_back(std::move(path));
  }
}

int Pace::Reach(int layer, int type, Terms terms, double units) const {
  const Problem& p = *problem_;
  int count = 0;
  for (int last = layer; last < p.layers && p.allowed[p.At(last, type)]; ++last) {
    p.Extend(&terms, last, type);
    if (terms.memory > p.capacity[type]) break;
    Terms bare = terms;
    bare.ts = bare.tp = 0;
    if (bare.Busy(units) > tau_) break;
    ++count;
  }
  return count;
}

bool Pace::Fits(const double* used, const float* more) const {
  for (int t = 0; t < problem_->types; ++t) {
    if (used[t] + more[t] > left_[t]) return false;
  }
  return true;
}

// The cheapest way to finish by one table: whether it keeps the limits, and what it uses.
Pace::Answer Pace::Known(const Finish& finish, const State& state, float* use) const {
  const Problem& p = *problem_;
  int types = p.types, type = state.type;
  if (!state.goes_on && state.beside == kInf) {
    size_t at = p.At(state.layer, type);
    if (finish.on[at] == kInf) return Answer::kNo;
    std::copy_n(&finish.use_on[at * types], types, use);
    return Fits(state.used, use) ? Answer::kYes : Answer::kUnknown;
  }
  // The run may end after any later layer.
  Terms terms = state.goes_on ? state.run : Terms();
  double best = kInf;
  for (int last = state.layer; last < p.layers; ++last) {
    if (!p.allowed[p.At(last, type)]) break;
    p.Extend(&terms, last, type);
    if (terms.memory > p.capacity[type] || terms.cs > tau_ || terms.ds > tau_) break;
    if (!p.Ends(last) || !Parted(state.beside, terms, type)) continue;
    Rest rest = After(finish, terms, last, type);
    if (rest.cost == kInf) continue;
    double units = terms.Units(tau_);
    double taken = state.used[type] + units;
    if (taken > left_[type]) continue;
    double value = finish.weight[type] * units + rest.cost;
    const float* after = rest.use;
    bool fits = taken + after[type] <= left_[type];
    for (int t = 0; fits && t < types; ++t) {
      fits = t == type || state.used[t] + after[t] <= left_[t];
    }
    if (value < best || fits) {
      best = value;
      std::copy_n(after, types, use);
      use[type] += static_cast<float>(units);
    }
    if (fits) return Answer::kYes;
  }
  return best < kInf ? Answer::kUnknown : Answer::kNo;
}

bool Pace::CanFinish(int layer, int type, const Terms& run, bool goes_on, const double* used,
                     double beside) const {
  float use[kMaxTypes];
  State state{layer, type, run, goes_on, used, beside};
  for (const auto& finish : finishes_) {
    Answer answer = Known(*finish, state, use);
    if (answer == Answer::kYes) return true;
    if (answer == Answer::kNo) return false;  // limits aside, so no table knows better
  }
  if (!goes_on && Hopeless(layer, type, true, false, used)) return false;
  for (const auto& path : paths_) {
    if (Follow(state, path)) return true;
  }
  if (Learn(state)) return true;
  if (searches_left_ <= 0) return false;
  --searches_left_;
  nodes_left_ = nodes_ / 500;  // what is not found soon seldom is
  std::vector<double> left(used, used + problem_->types);
  std::vector<int32_t> path(problem_->layers, -1);
  if (!Search(state, left.data(), &path)) return false;
  paths_.push_back(std::move(path));
  return true;
}

// Whether the layers to come may go the way of `path`.
bool Pace::Follow(const State& state, const std::vector<int32_t>& path) const {
  const Problem& p = *problem_;
  if (path[state.layer] < 0 || path[state.layer] % p.types != state.type) return false;
  std::vector<double> used(state.used, state.used + p.types);
  Terms terms = state.goes_on ? state.run : Terms();
  double beside = state.beside;
  for (int layer = state.layer; layer < p.layers; ++layer) {
    int type = path[layer] % p.types;
    p.Extend(&terms, layer, type);
    if (terms.memory > p.capacity[type]) return false;
    bool goes_on = layer + 1 < p.layers && path[layer + 1] == path[layer];
    if (goes_on && !p.Overflows(terms, layer + 1, type)) continue;
    if (!Parted(beside, terms, type)) return false;
    used[type] += terms.Units(tau_);
    if (!(used[type] <= left_[type])) return false;
    bool again = layer + 1 < p.layers && path[layer + 1] % p.types == type;
    beside = again ? p.Whole(terms) : kInf;
    terms = Terms();
  }
  return true;
}

// Looks for a way by raising the weight of types that the best way overdraws.
bool Pace::Learn(const State& state) const {
  const Problem& p = *problem_;
  float use[kMaxTypes];
  std::vector<double> weight = finishes_.back()->weight;
  double mean = 0;
  for (double price : p.price) mean += price / p.types;
  if (Known(*finishes_.back(), state, use) == Answer::kNo) return false;
  for (int round = 0; round < 6 && solves_left_ > 0; ++round) {
    bool moved = false;
    for (int t = 0; t < p.types; ++t) {
      double over = (state.used[t] + use[t]) / std::max(left_[t], 1e-9);
      if (over > 1) {
        weight[t] = std::max(weight[t], 1e-3 * mean) * std::min(over * over * 1.05, 3.0);
        moved = true;
      }
    }
    if (!moved) return false;
    --solves_left_;
    Finish finish = Solve(weight);
    if (Known(finish, state, use) == Answer::kYes) {
      finishes_.push_back(std::make_unique<Finish>(std::move(finish)));
      return true;
    }
  }
  return false;
}

const std::vector<Finish>& Pace::Least() const {
  if (least_.empty()) {
    for (int t = 0; t < problem_->types; ++t) {
      std::vector<double> weight(problem_->types, 0.0);
      weight[t] = 1;
      least_.push_back(Solve(weight));
    }
  }
  return least_;
}

// Whether even the least use of some type, whatever the others, is too much: of a way that starts
// on `type` (`on`), on any other (`off`), or on either.
bool Pace::Hopeless(int layer, int type, bool on, bool off, const double* used) const {
  size_t at = problem_->At(layer, type);
  auto cost = [&](const Finish& finish) {
    return std::min(on ? finish.on[at] : kInf, off ? finish.off[at] : kInf);
  };
  if (dual_) {
    // Whatever the weights, a way within the limits costs at most what they leave.
    double value = cost(*dual_);
    for (int t = 0; t < problem_->types; ++t) value += dual_->weight[t] * used[t];
    if (value > dual_left_ * (1 + 1e-9)) return true;
  }
  const std::vector<Finish>& least = Least();
  for (int t = 0; t < problem_->types; ++t) {
    if (used[t] + cost(least[t]) > left_[t]) return true;
  }
  return false;
}

// Depth first over the stages to come, those first that take least of what is scarce; `path` gets
// the types of a way that was found.
bool Pace::Search(const State& state, double* used, std::vector<int32_t>* path) const {
  const Problem& p = *problem_;
  struct End {
    double value, units, bytes;
    int last;
  };
  int type = state.type;
  const Finish& order = dual_ ? *dual_ : *finishes_[0];
  std::vector<End> ends;
  Terms terms = state.goes_on ? state.run : Terms();
  for (int last = state.layer; last < p.layers; ++last) {
    if (!p.allowed[p.At(last, type)]) break;
    p.Extend(&terms, last, type);
    if (terms.memory > p.capacity[type] || terms.cs > tau_ || terms.ds > tau_) break;
    double units = terms.Units(tau_), bytes = p.Whole(terms);
    if (!p.Ends(last) || used[type] + units > left_[type]) continue;
    double rest = After(order, terms, last, type).cost;
    if (rest == kInf || !Parted(state.beside, terms, type)) continue;
    ends.push_back({order.weight[type] * units + rest, units, bytes, last});
  }
  std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) { return a.value < b.value; });
  for (const End& end : ends) {
    if (--nodes_left_ <= 0) return false;
    used[type] += end.units;
    bool found =
        end.last + 1 == p.layers || (!Hopeless(end.last + 1, type, p.cuts, true, used) &&
                                     SearchNext(end.last + 1, type, end.bytes, used, path));
    used[type] -= end.units;
    if (found) {
      int after = end.last + 1 < p.layers ? (*path)[end.last + 1] : -1;
      int code = Code(type, after, p.types);
      std::fill(path->begin() + state.layer, path->begin() + end.last + 1, code);
      return true;
    }
  }
  return false;
}

// The same for a stage that starts at `layer`, on any type but `before`, or that one if the stage
// on it before, of so many bytes, is apart from it.
bool Pace::SearchNext(int layer, int before, double bytes, double* used,
                      std::vector<int32_t>* path) const {
  const Problem& p = *problem_;
  const Finish& order = dual_ ? *dual_ : *finishes_[0];
  std::vector<int> types;
  for (int t = 0; t < p.types; ++t) {
    if ((t != before || p.cuts) && order.on[p.At(layer, t)] < kInf) types.push_back(t);
  }
  std::sort(types.begin(), types.end(),
            [&](int a, int b) { return order.on[p.At(layer, a)] < order.on[p.At(layer, b)]; });
  for (int t : types) {
    double beside = t == before ? bytes : kInf;
    if (!Hopeless(layer, t, true, false, used) &&
        Search({layer, t, {}, false, used, beside}, used, path)) {
      return true;
    }
  }
  return false;
}

void Pace::Describe() {
  namespace is = layer_feature;
  const Problem& p = *problem_;
  int layers = p.layers, types = p.types;
  std::vector<double> units(static_cast<size_t>(layers) * types, kInf), money(units);
  std::vector<double> least(layers, kInf);
  double cheapest_unit = kInf, mean_log = 0;
  double dearest = *std::max_element(seen_.begin(), seen_.end());
  auto price = [&](int t) { return std::max(seen_[t], dearest * 1e-6 + 1e-12); };
  for (int t = 0; t < types; ++t) {
    cheapest_unit = std::min(cheapest_unit, price(t));
    mean_log += std::log10(price(t)) / types;
  }
  for (int l = 0; l < layers; ++l) {
    for (int t = 0; t < types; ++t) {
      size_t at = p.At(l, t);
      if (!p.Usable(l, t)) continue;
      Terms alone;
      p.Extend(&alone, l, t);
      alone.ts = alone.tp = 0;
      units[at] = alone.Fraction(tau_);
      money[at] = units[at] * price(t);
      least[l] = std::min(least[l], money[at]);
    }
  }
  double total = 0;
  for (double value : least) total += value < kInf ? value : 0;
  reference_ = total + cheapest_unit + p.PsUnits(floor_) * seen_[p.ps_type];
  double tiny = 1e-9 * reference_;
  features_.assign(units.size() * kLayerFeatures, 0);
  double done = 0;
  for (int l = 0; l < layers; ++l) {
    for (int t = 0; t < types; ++t) {
      size_t at = p.At(l, t);
      float* f = &features_[at * kLayerFeatures];
      bool usable = units[at] < kInf;
      double cs = p.compute_serial[at], cp = p.compute_parallel[at];
      double ds = p.sync_serial[at], dp = p.sync_parallel[at];
      double ts = p.transfer_serial[at], tp = p.transfer_parallel[at];
      auto need = [&](double s, double q) { return tau_ > s ? q / (tau_ - s) : kInf; };
      f[is::usable] = usable ? 1.0F : 0.0F;
      f[is::compute_units] = usable ? Log10(need(cs, cp), -4, 4) : -1;
      f[is::sync_units] = usable ? Log10(need(ds, dp), -4, 4) : -1;
      f[is::transfer_units] = p.allowed[at] && l + 1 < layers ? Log10(need(ts, tp), -4, 4) : -1;
      f[is::serial_share] = static_cast<float>(std::min(std::max(cs, ds) / tau_, 1.0));
      f[is::transfer_serial_share] = static_cast<float>(std::min(ts / tau_, 1.0));
      f[is::price_over_cheapest] =
          usable ? static_cast<float>(
                       std::min(std::log10(std::max(money[at], tiny) / std::max(least[l], tiny)),
                                4.0) /
                       4)
                 : 1;
      f[is::price] = usable ? Log10(money[at] / reference_, -5, 2) : 0;
      f[is::unit_price_over_mean] =
          static_cast<float>(std::clamp(std::log10(price(t)) - mean_log, -4.0, 4.0) / 4);
      f[is::unit_price] = Log10(price(t) / reference_, -5, 2);
      f[is::units_left] = Log10(std::max(left_[t], 0.1), -1, 6);
      f[is::units_share] = usable ? Log10(units[at] / std::max(left_[t], 0.1), -4, 1) : 1;
      f[is::memory_share] =
          static_cast<float>(std::min(p.memory[at] / std::max(p.capacity[t], 1e-300), 1.0));
      f[is::parameter_server] = t == p.ps_type ? 1.0F : 0.0F;
      f[is::position] = static_cast<float>(l) / layers;
      f[is::layers_left] = static_cast<float>(std::log10(layers - l) / 3);
      f[is::price_share_before] = static_cast<float>(done / std::max(total, 1e-300));
      f[is::transfer_price] =
          usable && l + 1 < layers ? Log10(need(ts, tp) * price(t) / reference_, -5, 2) : 0;
      f[is::price_root] =
          usable ? static_cast<float>(std::sqrt(std::min(money[at] / reference_, 1.0))) : 1;
      f[is::least_price_root] = static_cast<float>(
          std::sqrt(std::min((least[l] < kInf ? least[l] : 0) / reference_, 1.0)));
      int reach = usable ? Reach(l, t, {}, std::max(1.0, std::ceil(units[at]))) : 0;
      f[is::reach] = static_cast<float>(std::log10(1.0 + reach) / 2);
      f[is::reach_share] = static_cast<float>(reach) / (layers - l);
    }
    done += least[l] < kInf ? least[l] : 0;
  }
}

}  // namespace heterps::scheduler
