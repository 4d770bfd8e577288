"""What a plan comes to once it runs in steps: its micro-batches, its staleness, its throughput.

From one update of staleness on, forwards of later steps fill the pipeline while backwards return,
as far as the steps that may be under way hold micro-batches enough. The least staleness and the
fewest micro-batches are found with which a simulation of the executor reaches the slowest stage's
pace; then the next size that keeps it is taken, so that the ends of steps (sum, verdict, update),
which no cost tells, find slack. Where nothing reaches that pace, the plan is priced at what it
reaches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.steps import Steps
from scheduler.problem.wording import rate_text

_FULL = 0.99  # of the slowest stage's pace: the pipeline is filled
MOST_STALE = 8  # updates; more than that fills nothing, and is paid with memory


def executed(model: CostModel, plan: Plan, floor: float = 0.0) -> Plan:
    """The plan as it runs; it is not feasible where it then misses floor or memory.

    The same plan where nothing is said of steps, or where it has no stages.
    """
    if model.steps.staleness is None or not plan.stages:
        return plan
    codes, units = model.codes(plan), [stage.units for stage in plan.stages]
    runs = model.runs(codes)
    best, rate, full = None, 0.0, 0.0
    filled = False
    for steps in _choices(model.steps):
        if filled and best is not None and steps.staleness != best.staleness:
            break
        if model.footprint.why_overfull(runs, units, steps):
            continue
        pace, reached = plan.throughput, plan.throughput
        if not steps.simulated:
            priced = model.sized(steps.micro_batches)
            pace = 1 / priced.slowest_s(priced.runs(codes), units)
            reached = steady_rate(priced, plan, steps)
        # Smaller micro-batches may cost more themselves.
        if filled and (pace < _FULL * full or reached < rate * (1 - TOLERANCE) * pace / full):
            continue  # of a size that does not go with the units; the next may
        if filled or reached > rate * (1 + TOLERANCE):
            best, rate, full = steps, reached, pace
        if filled:
            break
        filled = rate >= _FULL * full and rate >= min(floor, full)
        if filled and sum(units) == 1:
            break
    found = plan
    if best is None:
        best = next(_choices(model.steps))
        reason = plan.reason or model.footprint.why_overfull(runs, units, best)
        found = replace(plan, feasible=False, reason=reason)
    elif not best.simulated:
        priced, rate = model.sized(best.micro_batches), min(rate, plan.throughput)
        found = priced.evaluate(codes, units, floor, rate)
        if not plan.feasible:
            reason = plan.reason
            if found.sustained < floor and priced.evaluate(codes, units, rate=rate).feasible:
                most = rate_text(found.sustained, down=True)
                reason = f"reaches at most {most} samples/s, the floor is {rate_text(floor)}"
            found = replace(found, feasible=False, reason=reason)
    kept = model.footprint.stage_bytes(runs, units, best)
    stages = [replace(s, memory_bytes=m) for s, m in zip(found.stages, kept, strict=True)]
    return replace(
        found,
        stages=tuple(stages),
        micro_batches=best.micro_batches,
        staleness=best.staleness,
    )


def fastest(model: CostModel, plans: Iterable[Plan]) -> Plan | None:
    """The fastest of plans as they run that limits, cap and memory allow, whatever the floor."""
    free = [plan if plan.feasible else _held_to_no_floor(model, plan) for plan in plans]
    return max((p for p in free if p.feasible), key=lambda p: p.sustained, default=None)


def _held_to_no_floor(model: CostModel, plan: Plan) -> Plan:
    if not plan.stages or not holds(model, plan):
        return plan
    units = [stage.units for stage in plan.stages]
    free = model.evaluate(model.codes(plan), units, rate=plan.throughput)
    return replace(free, micro_batches=plan.micro_batches, staleness=plan.staleness)


def steady_rate(model: CostModel, plan: Plan, steps: Steps) -> float:
    """Samples/s of a plan by simulation, once the pipeline is as full as it gets."""
    runs = model.runs(model.codes(plan))
    units = [stage.units for stage in plan.stages]
    return steps.batch / model.step_s(runs, units, steps, model.slowest_s(runs, units))


def fills(model: CostModel, plan: Plan) -> bool:
    """Whether a plan as it runs keeps the pace of its slowest stage, or nearly so."""
    slowest = max(stage.busy_s for stage in plan.stages)
    return plan.staleness is None or plan.throughput * slowest >= _FULL


def holds(model: CostModel, plan: Plan) -> bool:
    """Whether each stage fits its units' memory with what it has in flight."""
    if plan.staleness is None:
        return True
    steps = replace(model.steps, staleness=plan.staleness, micro_batches=plan.micro_batches)
    units = [stage.units for stage in plan.stages]
    return not model.footprint.why_overfull(model.runs(model.codes(plan)), units, steps)


def _choices(steps: Steps) -> Iterator[Steps]:
    """Staleness and micro-batches to try, the least first."""
    if steps.simulated:
        yield steps
        return
    for staleness in range(1, min(steps.staleness or 0, MOST_STALE) + 1):
        for count in steps.parts:
            yield replace(steps, staleness=staleness, micro_batches=count)
