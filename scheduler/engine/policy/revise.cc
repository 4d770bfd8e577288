#include "policy/revise.h"

#include <map>

#include "policy/player.h"
#include "problem/step_units.h"

namespace heterps::scheduler {
namespace {

constexpr double kStages = 0.3;  // share of trials that forget whole stages
constexpr double kFirst = 0.35;  // share of those where only a window's first layer is drawn warm
constexpr double kOther = 0.8;   // share of trials whose first layer must move to another type
constexpr double kEdge = 0.4;  // share of windows that begin where a stage does, or a layer before
// Of simulated steps: share of trials where a window goes to one type, drawn so much warmer.
constexpr double kWhole = 0.4;
constexpr float kWarmer = 3;
constexpr int kFines = 8;    // trials between changes of the fine
constexpr double kHot = 10;  // heats by which a plan is dearer that is all but never taken

// What overdrawing limits costs: more while the plan does, less while it does not.
class Fines {
 public:
  explicit Fines(const Pace& pace) : fine_(pace.problem().types) {
    double mean = 0;
    for (double price : pace.problem().price) mean += price / pace.problem().types;
    for (size_t t = 0; t < fine_.size(); ++t) {
      base_.push_back(std::max({pace.guide().weight[t], pace.problem().price[t], 1e-3 * mean}));
    }
    Move(1);
  }

  const std::vector<double>& each() const { return fine_; }
  void Move(double factor) {
    scale_ = std::clamp(scale_ * factor, 0.05, 100.0);
    for (size_t t = 0; t < fine_.size(); ++t) fine_[t] = scale_ * base_[t];
  }

 private:
  std::vector<double> base_, fine_;
  double scale_ = 1;
};

// The layers to forget.
std::vector<Player::Window> Forget(Player* player, const std::vector<int32_t>& now, int most) {
  int layers = static_cast<int>(now.size());
  auto window = [&] {
    // Small ones more often.
    int size = 1 + static_cast<int>(player->Random() * player->Random() * most);
    size = std::min(size, layers);
    int from = static_cast<int>(player->Random() * (layers - size + 1));
    if (player->Random() < kEdge) {
      while (from > 0 && now[from - 1] == now[from]) --from;
      if (from > 0 && player->Random() < 0.5) --from;
    }
    return Player::Window{from, from + size};
  };
  Player::Window one = window();
  if (player->Random() < kStages) {
    int end = one.from, stages = 1 + static_cast<int>(player->Random() * 3);
    while (one.from > 0 && now[one.from - 1] == now[one.from]) --one.from;
    for (int n = 0; n < stages && end < layers; ++n) {
      for (++end; end < layers && now[end] == now[end - 1];) ++end;
    }
    return {{one.from, end}};
  }
  if (player->Random() < 0.5) return {one};
  Player::Window two = window();
  if (two.from < one.from) std::swap(one, two);
  if (two.from < one.to) return {{one.from, std::max(one.to, two.to)}};
  return {one, two};
}

std::vector<int32_t> ReviseOne(Player* player, const std::shared_ptr<Pace>& pace,
                               const int32_t* assignment, const ReviseSettings& settings) {
  const Problem& problem = pace->problem();
  int layers = problem.layers;
  std::vector<int32_t> found, now(assignment, assignment + layers);
  bool soft = settings.slack > 1, within = false, fits = false;
  bool stepped = problem.micro_batches > 0 && problem.staleness == 0;
  Fines fines(*pace);
  StepUnits units(problem, settings.floor);
  // What is above `most` need not be known.
  auto price_of = [&](const Episode& episode, double most, bool* fit) {
    return stepped ? units.Price(episode.assignment(), most, fit)
                   : episode.Price(fines.each(), fit);
  };
  auto priced = [&] {
    Episode episode(pace);
    for (int layer = 0; layer < layers; ++layer) episode.Keep(now.data());
    return price_of(episode, kInf, &within);
  };
  double current = priced();
  double least = within ? current : kInf;
  for (int trial = 0; trial < settings.trials; ++trial) {
    std::vector<Player::Window> windows = Forget(player, now, settings.window);
    bool first = player->Random() < kFirst, other = player->Random() < kOther;
    float warmth = settings.temperature * static_cast<float>(0.4 + 1.2 * player->Random());
    bool whole = stepped && player->Random() < kWhole;
    if (whole) warmth *= kWarmer;
    Episode episode(pace);
    if (!player->Redraw(now.data(), windows, {warmth, first, other, settings.slack, whole},
                        &episode)) {
      continue;
    }
    if (soft && !stepped && trial % kFines == kFines - 1) {
      fines.Move(within ? 0.8 : 1.25);
      current = priced();
    }
    if (episode.assignment() == now) continue;
    double heat = settings.heat * (1 - static_cast<double>(trial) / settings.trials);
    double price = price_of(episode, current * (1 + kHot * heat), &fits);
    if (!(price < kInf) || (!fits && !soft && !stepped)) continue;
    bool taken =
        price <= current || (heat > 0 && player->Random() < std::exp((1 - price / current) / heat));
    if (!taken) continue;
    now = episode.assignment();
    current = price;
    within = fits;
    if (fits && price < least * (1 - 1e-12)) {
      least = price;
      found.insert(found.end(), now.begin(), now.end());
    }
  }
  return found;
}

}  // namespace

std::vector<int32_t> Revise(const Network& network, const std::vector<std::shared_ptr<Pace>>& paces,
                            const int32_t* assignments, const ReviseSettings& settings,
                            uint64_t seed) {
  // Several plans may be revised at one pace, which is encoded once.
  std::map<const Pace*, Encoded> known;
  std::vector<const Pace*> distinct;
  for (const auto& pace : paces) {
    if (known.emplace(pace.get(), nullptr).second) distinct.push_back(pace.get());
  }
  ParallelFor(distinct.size(),
              [&](size_t n) { known.at(distinct[n]) = Encode(network, *distinct[n]); });
  return ForEachPace(paces.size(), seed, [&](size_t n, uint64_t own) {
    Player player(network, paces[n], known.at(paces[n].get()), own);
    const int32_t* start = assignments + n * paces[n]->problem().layers;
    return ReviseOne(&player, paces[n], start, settings);
  });
}

}  // namespace heterps::scheduler
