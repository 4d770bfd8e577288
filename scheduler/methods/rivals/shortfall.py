"""How far an assignment is from meeting the demands.

A searcher that is only told "infeasible" walks blindly; this prices each demand that is missed, so
that it can be led to the plans that meet them. All logarithms of a ratio, hence free of units.
"""

import numpy as np

from scheduler.methods.rivals.problem import Assignments, Problem
from scheduler.problem.cost import Floats


def shortfall(problem: Problem, rows: Assignments) -> Floats:
    """Return the sum of what `rows` miss, at least 0, [n].

    At the floor (at any speed where there is none) every stage takes the fewest units that keep
    pace; the terms are log(need / available) of memory a unit, units of a type and price an hour,
    and log(time / allowed) of a stage too slow on all units of its type.
    """
    model, floor = problem.model, problem.floor
    count, layers = rows.shape
    starts = np.ones((count, layers), dtype=bool)
    for layer in np.flatnonzero(model.joined):
        rows = rows.copy()
        rows[:, layer] = rows[:, layer - 1]
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1]
    at = np.tile(np.arange(layers), count), rows.ravel() % model.num_types
    first = np.flatnonzero(starts)
    last = np.append(first[1:], count * layers) - 1
    kind, row = at[1][first], first // layers

    def total(terms: Floats) -> Floats:
        sums: Floats = np.add.reduceat(terms[at], first)
        return sums

    moves = at[0][last] < layers - 1
    end = at[0][last], kind
    cs, cp = total(model.compute_serial), total(model.compute_parallel)
    ds = total(model.sync_serial) + model.transfer_serial[end] * moves
    dp = total(model.sync_parallel) + model.transfer_parallel[end] * moves

    limit = model.limit[kind].astype(float)
    tau = 1 / floor if floor > 0 else np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.maximum(_units(cs, cp, tau), _units(ds, dp, tau))
        late = np.log(np.maximum(cs + cp / limit, ds + dp / limit) / tau)
        memory = np.log(total(model.memory) / model.capacity[kind])
    units = np.clip(np.ceil(need), 1.0, limit)
    used = np.bincount(row * model.num_types + kind, units, count * model.num_types)
    used = used.reshape(count, model.num_types)
    used[:, model.ps_type] += max(np.ceil(floor * model.ps_unit_s), float(model.ps_unit_s > 0))
    with np.errstate(divide="ignore"):
        over = np.maximum(np.log(used / model.limit), 0.0).sum(axis=1)
        over += np.maximum(np.log(used @ model.price / model.search_cap), 0.0)
    # What does not fit is cut, where that may be.
    stages = np.maximum(late, 0.0) + np.maximum(memory, 0.0) * (not model.cuts)
    missed: Floats = over + np.bincount(row, stages, count)
    return missed


def _units(serial: Floats, parallel: Floats, tau: float) -> Floats:
    """Units with serial + parallel / units <= tau, as a real number; infinite where none is."""
    need: Floats = np.where(
        parallel > 0, np.where(tau > serial, parallel / (tau - serial), np.inf), 0.0
    )
    return need
