"""Placements by a rule: one device for everything, or one for each kind of layer."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.methods.rivals.problem import Assignments, Budget, Found, Problem
from scheduler.methods.rivals.search import Search
from scheduler.problem.plan import Plan


def all_cpu(problem: Problem, budget: Budget, seed: int) -> Found:
    """Place every layer on one CPU type; the best of these types.

    A layer that cannot run there goes to the parameter server's type, else to its cheapest of the
    same device, else to its cheapest of any.
    """
    return _each(problem, budget, lambda cpu, _: np.full(problem.model.num_layers, cpu), "CPU")


def all_gpu(problem: Problem, budget: Budget, seed: int) -> Found:
    """Place every layer on one GPU type; the best of these types, with `all_cpu`'s exceptions."""
    return _each(problem, budget, lambda _, gpu: np.full(problem.model.num_layers, gpu), "GPU")


def aibox(problem: Problem, budget: Budget, seed: int) -> Found:
    """Place data-intensive layers on a CPU type, the rest on a GPU type; the best pair of types.

    As AIBox (Zhao et al., CIKM 2019) divides a model. Data-intensive is a layer of kind
    `embedding`, or one that on the CPU type takes longer to synchronise than to compute.
    """
    model = problem.model
    compute = model.compute_serial + model.compute_parallel
    sync = model.sync_serial + model.sync_parallel

    def place(cpu: int, gpu: int) -> NDArray[np.intp]:
        heavy = _embeddings(problem) | (model.allowed[:, cpu] & (sync > compute)[:, cpu])
        return np.where(heavy, cpu, gpu)

    return _each(problem, budget, place, "CPU", "GPU")


def byteps(problem: Problem, budget: Budget, seed: int) -> Found:
    """Place every layer that computes on a GPU type, tables alone on a CPU type; the best pair.

    As BytePS (Jiang et al., OSDI 2020): GPUs do all of the forward and backward passes, CPUs hold
    and sum parameters. The summing is the parameter server's cores in the cost model, which every
    plan pays; so here only layers of kind `embedding`, which are parameters more than arithmetic,
    are on CPUs. It is `aibox` where no other layer is data-intensive, and `all-gpu` where there is
    no embedding.
    """
    return _each(
        problem, budget, lambda cpu, gpu: np.where(_embeddings(problem), cpu, gpu), "CPU", "GPU"
    )


def _embeddings(problem: Problem) -> NDArray[np.bool_]:
    return np.array([layer.kind == "embedding" for layer in problem.model.workload.layers])


def _each(
    problem: Problem,
    budget: Budget,
    place: Callable[[int, int], NDArray[np.intp]],
    *devices: str,
) -> Found:
    """Return the best of `place` over the CPU and GPU types of `devices`."""
    cpus, gpus = _types(problem, cpu=True), _types(problem, cpu=False)
    for device in devices:
        if not {"CPU": cpus, "GPU": gpus}[device]:
            names = tuple(problem.model.types[kind] for kind in problem.alone)
            reason = f"no {device} type is on offer"
            return Found(Plan(False, reason, names, (), 0, 0.0, 0.0, float("inf")), 0, 0.0)
    pairs = [
        (cpu, gpu)
        for cpu in (cpus if "CPU" in devices else [-1])
        for gpu in (gpus if "GPU" in devices else [-1])
    ]
    search = Search(problem, budget, len(pairs))
    search.score(_able(problem, np.array([place(*pair) for pair in pairs]), cpus))
    return search.found()


def _types(problem: Problem, cpu: bool) -> list[int]:
    kinds = problem.model.resources.types
    return [index for index, kind in enumerate(kinds) if kind.is_cpu == cpu]


def _able(problem: Problem, rows: NDArray[np.intp], cpus: Sequence[int]) -> Assignments:
    """Move layers off types that cannot run them, [n, L]."""
    usable, model = problem.usable, problem.model
    layers = np.arange(model.num_layers)
    on_cpu = np.isin(np.arange(model.num_types), cpus)
    # The cheapest type of the same device, else of any.
    same = np.where(on_cpu == on_cpu[rows][..., None], problem.money, np.inf)
    fallback = np.where(np.isfinite(same).any(axis=-1), same.argmin(axis=-1), problem.alone)
    fallback = np.where(usable[:, model.ps_type], model.ps_type, fallback)
    able: Assignments = np.where(usable[layers, rows], rows, fallback).astype(np.int32)
    return able
