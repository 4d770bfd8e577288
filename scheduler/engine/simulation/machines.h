// What takes turns in a simulated run: cores, links, shards; and times that vary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "simulation/run.h"

namespace heterps::scheduler {

// First come, first served, by so many cores that all share; without any, nobody waits.
class Cores {
 public:
  explicit Cores(int cores) : free_(cores, 0.0) {}

  // When work of `seconds` ends that is there at `at`.
  double Take(double at, double seconds) {
    if (free_.empty() || seconds <= 0) return at + seconds;
    double& first = *std::min_element(free_.begin(), free_.end());
    first = std::max(first, at) + seconds;
    return first;
  }

 private:
  std::vector<double> free_;
};

// The shards, and a step's messages to all of them.
class Shards {
 public:
  Shards(const Serving& serving, int workers)
      : serving_(serving), served_(serving.shards), in_(served_), out_(served_) {
    in_of_.resize(workers), out_of_.resize(workers);
    slowness_ = serving.slowness;
    slowness_.resize(served_.size(), 1.0);
  }

  // All rows of a worker's `count` micro-batches; returns when it has them.
  double Pull(int worker, double now, double count, Cores* cores) {
    double each = serving_.message + count * serving_.pull, last = now;
    double sent = Send(now, count * serving_.client_pull, cores);
    double gap = (sent - now) / static_cast<double>(served_.size());
    for (size_t i = 0; i < served_.size(); ++i) {
      double at = Serve(i, now + gap * static_cast<double>(i + 1) + serving_.way, each, cores);
      if (serving_.shard_pull_link > 0) at = Pass(&out_[i], at, count * serving_.shard_pull_link);
      if (serving_.pull_link > 0) at = Pass(&in_of_[worker], at, count * serving_.pull_link);
      last = std::max(last, at + serving_.way);
    }
    return serving_.priced ? std::max(now, last - each) : last;
  }

  // A worker's part of a step's gradients; returns when all shards have acknowledged it.
  double Push(int worker, double now, double count, Cores* cores) {
    double each = serving_.message + count * serving_.push, last = now;
    double sent = Send(now, count * serving_.client_push, cores);
    double gap = (sent - now) / static_cast<double>(served_.size());
    for (size_t i = 0; i < served_.size(); ++i) {
      double at = now + gap * static_cast<double>(i + 1);
      if (serving_.push_link > 0) at = Pass(&out_of_[worker], at, count * serving_.push_link);
      at += serving_.way;
      if (serving_.shard_push_link > 0) at = Pass(&in_[i], at, count * serving_.shard_push_link);
      last = std::max(last, Serve(i, at, each, cores) + serving_.way);
    }
    return serving_.priced ? std::max(now, last - each) : last;
  }

  // The commit of a step of `count` micro-batches.
  double Commit(double now, double count, Cores* cores) {
    double each = serving_.message + count * serving_.commit, last = now;
    double sent = Send(now, 0, cores), gap = (sent - now) / static_cast<double>(served_.size());
    for (size_t i = 0; i < served_.size(); ++i) {
      double at = now + gap * static_cast<double>(i + 1) + serving_.way;
      last = std::max(last, Serve(i, at, each, cores) + serving_.way);
    }
    return last;
  }

  double busy() const { return busy_; }

 private:
  double Send(double now, double rows, Cores* cores) const {
    return cores->Take(now, (rows + serving_.client_message) * static_cast<double>(served_.size()));
  }
  static double Pass(double* link, double at, double seconds) {
    *link = std::max(*link, at) + seconds;
    return *link;
  }
  double Serve(size_t shard, double at, double each, Cores* cores) {
    double seconds = each * slowness_[shard];
    busy_ += seconds;
    served_[shard] = cores->Take(std::max(at, served_[shard]), seconds);
    return served_[shard];
  }

  const Serving& serving_;
  std::vector<double> served_, in_, out_;  // until when each shard, and its links, are taken
  std::vector<double> in_of_, out_of_;     // likewise the workers' links
  std::vector<double> slowness_;
  double busy_ = 0;
};

// A number that follows from seed and place alone, so that what one change does to a run is not
// hidden by other draws.
inline double Drawn(uint64_t seed, uint64_t place) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + place * 0xD1B54A32D192ED03ull + 0x8CB92BA72F3D8DD7ull;
  for (int round = 0; round < 2; ++round) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
  }
  return (static_cast<double>(x >> 11) + 0.5) * 0x1p-53;
}

// A factor of mean 1 and standard deviation `noise`, log-normal.
inline double Varied(double noise, uint64_t seed, uint64_t place) {
  if (noise <= 0) return 1.0;
  double variance = std::log1p(noise * noise);
  double radius = std::sqrt(-2 * std::log(Drawn(seed, 2 * place)));
  double normal = radius * std::cos(2 * std::numbers::pi * Drawn(seed, 2 * place + 1));
  return std::exp(std::sqrt(variance) * normal - variance / 2);
}

}  // namespace heterps::scheduler
