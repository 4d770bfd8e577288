// scheduler._planner: the numbers behind planning. The interpreter's lock is released around work.
#include "bindings/bindings.h"

NB_MODULE(_planner, m) {
  nanobind::set_leak_warnings(false);
  heterps::scheduler::BindProblem(m);
  heterps::scheduler::BindSteps(m);
  heterps::scheduler::BindSimulation(m);
  heterps::scheduler::BindNetwork(m);
  heterps::scheduler::BindEpisodes(m);
  heterps::scheduler::BindExact(m);
}
