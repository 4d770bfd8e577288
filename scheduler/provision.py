"""Provisioning: the cheapest whole numbers of units for a fixed assignment.

For a target tau of the slowest stage each stage takes the fewest units with ET(k) <= tau. The
slowest stage's ET of any plan is one of the finitely many ET(k), so trying those is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.cost import TOLERANCE, CostModel, Floats, Plan, Run, time_text
from scheduler.sweep import minimise


def provision(model: CostModel, assignment: Sequence[int], floor: float = 0.0) -> Plan:
    """Return the cheapest plan of `assignment` (type index per layer) that reaches `floor`.

    Where none reaches it, the fastest one, not feasible, with the reason.
    """
    runs = model.runs(assignment)
    if model.why_impossible(assignment, runs):
        return model.evaluate(assignment, [1] * len(runs), floor)
    provisioner = _Provisioner(model, runs, floor)
    taus = provisioner.candidates
    within = taus[taus * floor * (1 - TOLERANCE) <= 1.0]
    if within.size:
        best = minimise(within, provisioner.prices)
        if best.index >= 0:
            return model.evaluate(assignment, provisioner.units(within[best.index]), floor)
    fastest = provisioner.fastest()
    if fastest is None:
        slow = model.evaluate(assignment, [1] * len(runs), floor)
        return Plan(False, slow.reason, slow.assignment, (), 0, 0.0, 0.0, math.inf)
    plan = model.evaluate(assignment, provisioner.units(fastest), floor)
    reason = (
        f"reaches at most {plan.throughput:,.1f} samples/s, the floor is {floor:,.1f}: "
        + provisioner.why_no_faster(fastest)
    )
    return replace(plan, feasible=False, reason=reason)


class _Provisioner:
    """Units, prices and limits of one assignment as functions of tau, seconds a sample."""

    def __init__(self, model: CostModel, runs: Sequence[Run], floor: float) -> None:
        self.model = model
        self.runs = runs
        self.floor = floor
        self.kinds = np.array([run.type for run in runs])
        self.owner = np.eye(model.num_types)[self.kinds]  # [stages, types]
        shared = np.bincount(self.kinds, minlength=model.num_types)
        most = np.maximum(model.limit - shared + 1, 1)
        # Ascending in time, so the number of units falls along each row.
        self.busy = [run.busy_s(int(most[run.type]))[::-1] for run in runs]
        low = max(busy[0] for busy in self.busy)
        self.candidates: Floats = np.unique(
            np.concatenate([busy[np.searchsorted(busy, low) :] for busy in self.busy])
        )

    def units_at(self, taus: Floats) -> Floats:
        """Fewest units of each stage with ET <= tau, [stages, n]."""
        return np.stack(
            [len(busy) + 1.0 - np.searchsorted(busy, taus, side="right") for busy in self.busy]
        )

    def units(self, tau: float) -> list[int]:
        """Fewest units of each stage at one tau."""
        return [int(number) for number in self.units_at(np.array([tau]))[:, 0]]

    def totals(self, taus: Floats) -> Floats:
        """Units of each type with the parameter server's, [types, n]."""
        model = self.model
        totals: Floats = self.owner.T @ self.units_at(taus)
        totals[model.ps_type] += model.ps_units(model.throughput(taus, self.floor))
        return totals

    def prices(self, taus: Floats) -> tuple[Floats, Floats]:
        """Price an hour at each tau, infinite beyond the limits."""
        totals = self.totals(taus)
        fits = (totals <= self.model.limit[:, None]).all(axis=0)
        price = np.where(fits, self.model.price @ totals, np.inf)
        return price, price

    def fastest(self) -> float | None:
        """Least tau within the limits; they only loosen as tau grows."""
        low, high = 0, len(self.candidates)
        while low < high:
            middle = (low + high) // 2
            if np.isfinite(self.prices(self.candidates[middle : middle + 1])[0][0]):
                high = middle
            else:
                low = middle + 1
        return float(self.candidates[low]) if low < len(self.candidates) else None

    def why_no_faster(self, tau: float) -> str:
        """Name what stops the plan at `tau` from going faster."""
        model, layers = self.model, self.model.workload.layers
        index = int(np.searchsorted(self.candidates, tau))
        if index > 0:
            totals = self.totals(self.candidates[index - 1 : index])[:, 0]
            kind = int(np.argmax(totals > model.limit))
            what = f"faster needs {totals[kind]:.0f} units of {model.types[kind]}"
            return f"{what}, limit {model.limit[kind]}"
        slowest = int(np.argmax([busy[0] for busy in self.busy]))
        run, name = self.runs[slowest], model.types[self.kinds[slowest]]
        most = len(self.busy[slowest])
        return (
            f"layers {layers[run.first].name!r} to {layers[run.last].name!r} on {name} take "
            f"{time_text(float(self.busy[slowest][0]))} a sample even with {most} units"
        )
