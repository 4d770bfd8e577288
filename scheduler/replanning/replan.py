"""Whether the rest of a run is worth moving to another plan.

The remaining samples are planned anew with the figures that were measured, each stage's its own.
Both plans are priced by the same updated cost model. What the running one takes beyond that, which
no stage explains, is the executor's overhead; it is expected of the other plan, too: otherwise any
plan on paper would beat any plan that runs. To move, the pipeline is drained and saved, and the new
workers start and pull; meanwhile the units of both plans are paid.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from scheduler.decision.record import Decision
from scheduler.planning.elastic import Bounds, plan_within
from scheduler.problem.fields import InputError
from scheduler.problem.plan import Plan
from scheduler.problem.workload import Resources, Workload
from scheduler.replanning.calibrate import calibrate
from scheduler.replanning.explain import reasons
from scheduler.replanning.measure import Measurement
from scheduler.replanning.proposal import Floor, Moving, Proposal, Threshold, shape


def propose(
    decision: Decision,
    measurement: Measurement,
    remaining_samples: float | None = None,
    *,
    method: str = "exact",
    moving: Moving | None = None,
    threshold: Threshold | None = None,
    bounds: Bounds | None = None,
    cautious: bool = False,
) -> Proposal:
    """Plan the rest of a run anew with what was measured, and compare.

    Args:
        decision: feasible, with its workload and resources; its floor, cap, pins and excluded
            types bind the new plan too.
        measurement: of a run of that decision.
        remaining_samples: above 0; None for all of the workload's, as of a next run.
        method: one of `METHODS`.
        bounds: on the units of the new plan.
        cautious: of layers that did not run on a type: see `calibrate`.

    Raises:
        InputError: the decision has no plan or lacks its inputs, or an argument cannot be used.
    """
    workload, resources = decision.workload, decision.resources
    if workload is None or resources is None:
        raise InputError("", "decision", "without workload or resources; expected both")
    if not decision.feasible or not decision.stages:
        raise InputError(
            "", "decision", f"there is no plan to compare with: {decision.plan.reason}"
        )
    left = workload.samples if remaining_samples is None else float(remaining_samples)
    if not 0 < left < math.inf:
        raise InputError("", "remaining_samples", f"{left!r}: expected a finite number above 0")
    moving, threshold = moving or Moving(), threshold or Threshold()
    slowest_s = max(stage.busy_s for stage in decision.stages)
    filled = min(1.0, decision.throughput * slowest_s)
    calibration = calibrate(
        workload,
        resources,
        decision.stages,
        measurement,
        filled,
        decision.plan.micro_batches,
        cautious=cautious,
    )
    rest = replace(calibration.workload, samples=left)
    current = _running(decision, rest)
    overhead = 1 / (1 - workload.overhead)
    if calibration.pace_s is not None:
        overhead = max(1.0, calibration.pace_s * current.throughput)
    floor = Floor.of(decision.min_throughput, current.throughput / overhead)
    rest = replace(rest, overhead=1 - 1 / overhead)
    proposed = _plan(decision, rest, floor.needed, method, bounds or Bounds())
    moving_cost = moving.seconds / 3600 * (current.price_per_hour + proposed.plan.price_per_hour)
    current_cost = current.cost * overhead
    proposed_cost = proposed.cost * overhead if proposed.feasible else math.inf
    savings = current_cost - proposed_cost
    moves = proposed.feasible and shape(proposed.stages) != shape(current.stages)
    pays = moves and threshold.met(savings, moving_cost, current_cost)
    proposal = Proposal(
        worthwhile=pays or (moves and floor.missed),
        reasons=(),
        remaining_samples=left,
        overhead=overhead,
        current_cost=current_cost,
        proposed_cost=proposed_cost,
        moving_s=moving.seconds,
        moving_cost=moving_cost,
        savings=savings,
        current=current,
        proposed=proposed,
    )
    sentences = reasons(proposal, decision, calibration, measurement, floor, threshold)
    return replace(proposal, reasons=tuple(sentences))


def _running(decision: Decision, workload: Workload) -> Plan:
    """The running plan by the updated figures; the units it has reserved are paid."""
    assert decision.resources is not None
    model = decision.model(workload, decision.resources, as_run=True)
    found = model.evaluate(model.codes(decision.plan), [s.units for s in decision.stages])
    return replace(
        found,
        ps_units=decision.plan.ps_units,
        price_per_hour=decision.plan.price_per_hour,
        cost=workload.samples / found.sustained / 3600 * decision.plan.price_per_hour,
    )


def _plan(
    decision: Decision, workload: Workload, floor: float, method: str, bounds: Bounds
) -> Decision:
    from scheduler.planning.planner import plan

    def best(resources: Resources, aim: float, without: Sequence[str]) -> Decision:
        return plan(
            workload,
            resources,
            aim or None,
            method=method,
            seed=decision.seed,
            pin=dict(decision.pin) or None,
            exclude=[*decision.excluded, *without],
            max_price_per_hour=decision.max_price_per_hour or None,
        )

    assert decision.resources is not None
    return plan_within(bounds, decision.resources, floor, best)
