// Each file binds one idea into scheduler._planner.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <utility>
#include <vector>

namespace heterps::scheduler {

template <typename T>
using Array = nanobind::ndarray<const T, nanobind::c_contig, nanobind::device::cpu>;

void BindProblem(nanobind::module_& m);     // problem_bindings.cc: Problem, provision
void BindSteps(nanobind::module_& m);       // steps_bindings.cc: the simulation of steps
void BindSimulation(nanobind::module_& m);  // simulation.cc: runs on machines that have limits
void BindEpisodes(nanobind::module_& m);    // episodes_bindings.cc: the environment's core
void BindNetwork(
    nanobind::module_& m);             // network_bindings.cc: the policy's network and its samples
void BindExact(nanobind::module_& m);  // exact_bindings.cc: the exact solver

// A NumPy array that owns `values`.
template <typename T>
nanobind::ndarray<nanobind::numpy, T> Owned(std::vector<T>&& values,
                                            std::initializer_list<size_t> shape) {
  auto* held = new std::vector<T>(std::move(values));
  nanobind::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(held->data(), shape, owner);
}

}  // namespace heterps::scheduler
