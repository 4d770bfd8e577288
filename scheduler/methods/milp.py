"""The cheapest plan at one pace as a mixed-integer program: an independent check of `exact`.

A binary variable for each possible stage (first, last, type), with the fewest units that keep the
pace; the stages chosen form a path over the layers, neighbours differ in type, and each type's
units stay within its limit. Solved by HiGHS through SciPy.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.problem.cost import TOLERANCE, CostModel, Floats


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The least price an hour at one pace, and its assignment (type index per layer).

    `bound` is what HiGHS proved: no plan at this pace is cheaper. Infinite, and no assignment,
    where no plan keeps the pace within limits and cap.
    """

    price_per_hour: float
    bound: float
    assignment: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Stages:
    """Every stage that can keep the pace, one entry each."""

    first: NDArray[np.int64]
    end: NDArray[np.int64]  # the layer after its last
    type: NDArray[np.int64]
    units: Floats


def cheapest(model: CostModel, tau: float, floor: float = 0.0, seconds: float = 60.0) -> Cheapest:
    """Find the least price an hour of plans whose stages take at most `tau` s a sample.

    The parameter server is sized for a throughput of 1 / tau, as in the exact solver's bound.

    Raises:
        ImportError: SciPy is not installed.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    ps_units = float(model.ps_units(model.throughput(np.array(tau), floor)))
    room = model.limit.astype(float)
    room[model.ps_type] -= ps_units
    nothing = Cheapest(math.inf, math.inf, None)
    stages = _stages(model, tau, room)
    if room.min() < 0 or not stages.type.size:
        return nothing
    count, layers, types = stages.type.size, model.num_layers, model.num_types
    each = np.arange(count)
    price = model.price[stages.type] * stages.units
    ones = np.ones(count)

    def rows(values: Any, at: Any, columns: Any, height: int) -> Any:
        return coo_array((values, (at, columns)), shape=(height, count)).tocsr()

    flow = rows(ones, stages.first, each, layers + 1) - rows(ones, stages.end, each, layers + 1)
    source = np.zeros(layers + 1)
    source[0], source[layers] = 1.0, -1.0
    used = rows(stages.units, stages.type, each, types)
    # Two stages of one type that meet would be one.
    place = [at * types + stages.type for at in (stages.first, stages.end)]
    meeting = rows(ones, place[0], each, (layers + 1) * types)
    meeting = meeting + rows(ones, place[1], each, (layers + 1) * types)
    fixed = ps_units * float(model.price[model.ps_type])
    constraints = [
        LinearConstraint(flow, source, source),
        LinearConstraint(used, -np.inf, room),
    ]
    if not model.cuts:
        constraints.append(LinearConstraint(meeting, -np.inf, 1.0))
    if math.isfinite(model.search_cap):
        most = model.search_cap * (1 + TOLERANCE) - fixed
        constraints.append(LinearConstraint(rows(price, 0 * each, each, 1), -np.inf, most))
    found = milp(
        price,
        integrality=ones,
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.status == 2:  # infeasible
        return nothing
    bound = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) + fixed
    if found.x is None:
        return Cheapest(math.inf, bound, None)
    assignment = np.zeros(layers, dtype=int)
    for n in np.flatnonzero(found.x > 0.5):
        first, kind = stages.first[n], stages.type[n]
        again = first > 0 and assignment[first - 1] == kind
        assignment[first : stages.end[n]] = kind + types * again
    return Cheapest(float(found.fun) + fixed, bound, tuple(int(kind) for kind in assignment))


def _stages(model: CostModel, tau: float, room: Floats) -> _Stages:
    parts = []
    for first in range(model.num_layers):
        if model.joined[first]:
            continue
        terms = (
            model.compute_serial,
            model.compute_parallel,
            model.sync_serial,
            model.sync_parallel,
        )
        cs, cp, ds, dp = (np.cumsum(term[first:], axis=0) for term in terms)
        ds[:-1] += model.transfer_serial[first:-1]
        dp[:-1] += model.transfer_parallel[first:-1]
        able = np.logical_and.accumulate(model.allowed[first:], axis=0)
        able &= np.cumsum(model.memory[first:], axis=0) <= model.capacity
        able &= ~np.append(model.joined[first + 1 :], False)[:, None]
        most = np.minimum(room, np.minimum.accumulate(model.most_units[first:], axis=0))
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.maximum(
                np.where(cp > 0, cp / (tau - cs), 0.0), np.where(dp > 0, dp / (tau - ds), 0.0)
            )
            units = np.maximum(np.ceil(need * (1 - 1e-12)), 1.0)
            able &= (cs <= tau) & (ds <= tau) & (units <= most)
        last, kind = np.nonzero(able)
        parts.append((np.full(last.size, first), last + first + 1, kind, units[last, kind]))
    first_, end, kind, units = (np.concatenate(some) for some in zip(*parts, strict=True))
    return _Stages(first_, end, kind, units)
