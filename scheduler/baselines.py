"""Placements by simple rules, to compare with: greedy, one device, random."""

from collections.abc import Sequence

import numpy as np

from scheduler.cost import CostModel, Plan
from scheduler.provision import provision


class Evaluator:
    """Provisions assignments for one model and floor, each only once."""

    def __init__(self, model: CostModel, floor: float = 0.0) -> None:
        self.model = model
        self.floor = floor
        self._plans: dict[tuple[int, ...], Plan] = {}

    def __call__(self, assignment: Sequence[int]) -> Plan:
        """Return the cheapest plan of `assignment` (type index per layer)."""
        key = tuple(int(kind) for kind in assignment)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = provision(self.model, key, self.floor)
        return plan


def greedy(evaluate: Evaluator) -> Plan:
    """Place layer after layer, each on the type that makes the cheapest plan of those so far.

    Layers still to come are held on the type where each alone is cheapest.
    """
    model = evaluate.model
    # Money a sample on one unit, the measure that needs no decision about other layers.
    alone = (
        model.compute_serial + model.compute_parallel + model.sync_serial + model.sync_parallel
    ) * model.price
    assignment = [int(kind) for kind in np.where(model.allowed, alone, np.inf).argmin(axis=1)]
    for row in range(model.num_layers):
        plans = {}
        for kind in np.flatnonzero(model.allowed[row]):
            assignment[row] = int(kind)
            plans[int(kind)] = evaluate(assignment)
        assignment[row] = min(plans, key=lambda kind: plans[kind].rank)
    return evaluate(assignment)


def one_device(evaluate: Evaluator, cpu: bool) -> Plan:
    """Place every layer on one CPU type, or on one GPU type; the best of these types.

    A layer that may not run there stays on the parameter server's type, else goes to its first
    allowed type of the same device, else to any.
    """
    model = evaluate.model
    on_cpu = [kind.is_cpu for kind in model.resources.types]
    chosen = [kind for kind in range(model.num_types) if on_cpu[kind] == cpu]
    if not chosen:
        names = tuple(model.types[kind] for kind in model.allowed.argmax(axis=1))
        device = "CPU" if cpu else "GPU"
        return Plan(False, f"no {device} type is on offer", names, (), 0, 0.0, 0.0, float("inf"))
    plans = []
    for kind in chosen:
        fallback = [model.ps_type, *(t for t in range(model.num_types) if on_cpu[t] == cpu)]
        order = [kind, *fallback, *range(model.num_types)]
        plans.append(evaluate([next(t for t in order if row[t]) for row in model.allowed]))
    return min(plans, key=lambda plan: plan.rank)


def random(evaluate: Evaluator, seed: int = 0, draws: int = 64) -> Plan:
    """Draw `draws` assignments uniformly; the best of them."""
    rng = np.random.default_rng(seed)
    choices = [np.flatnonzero(row) for row in evaluate.model.allowed]
    plans = [evaluate([int(rng.choice(some)) for some in choices]) for _ in range(draws)]
    return min(plans, key=lambda plan: plan.rank)
