// The time that searches are given: the thread's processor time, so that what they find does not
// depend on what else the machine does.
#pragma once

#include <chrono>
#include <ctime>

namespace heterps::scheduler {

struct Clock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return time_point(std::chrono::seconds(at.tv_sec) + std::chrono::nanoseconds(at.tv_nsec));
  }
};

}  // namespace heterps::scheduler
