"""What a plan says of steps and of its floor, in sentences."""

from typing import TYPE_CHECKING

from heterps.view.figures import duration, percent, rate

if TYPE_CHECKING:
    from scheduler import Decision


def notes(decision: "Decision") -> list[str]:
    """How a step is computed, and how far the plan is above its floor and why."""
    plan = decision.plan
    said = []
    if plan.micro_batches:
        batch = decision.workload.batch if decision.workload is not None else 0
        parts = f"{plan.micro_batches:,} micro-batch{'es' * (plan.micro_batches != 1)}"
        of = f"A step of {batch:,} samples" if batch else "A step"
        said.append(f"{of} is computed in {parts}.")
    if plan.staleness is not None:
        said.append(_staleness(plan.staleness))
        said += _delay(decision)
    if decision.overhead:
        text = f"The executor takes {percent(decision.overhead)} of the time besides"
        if decision.min_throughput and decision.throughput:
            more = 1 / (1 - decision.overhead) - 1
            text += f", so the plan is made for {percent(more)} more than the floor"
        elif decision.throughput:
            left = decision.throughput * (1 - decision.overhead)
            text += f": {rate(left)} samples/s are to be expected"
        said.append(f"{text}.")
    return said


def _delay(decision: "Decision") -> list[str]:
    """How much later than its sums a step's update is there, where that is known."""
    work = decision.workload
    if work is None:
        return []
    late = [
        sum(work.layers[row].cost[stage.type].delay_s for row in range(stage.first, stage.last + 1))
        for stage in decision.stages
    ]
    delay_s = max(late, default=0.0) * (work.batch or work.reference_batch) / work.reference_batch
    if not delay_s:
        return []
    return [f"Rows have what a step learned {duration(delay_s)} later than its sums tell."]


def floor_note(decision: "Decision") -> str:
    """Whether the floor was met once it had run; nothing where there is none or it has not."""
    from scheduler.decision.record import STEADY

    floor, run = decision.min_throughput, decision.measured
    if not floor or run is None:
        return ""
    if decision.floor_met is None:
        steps = f"{run.steady_steps:,} steady step{'s' * (run.steady_steps != 1)}"
        return (
            f"Whether the floor of {rate(floor)} samples/s was met is not known: there were "
            f"{steps}; {STEADY} tell."
        )
    reached = f"{rate(run.steady_throughput)} samples/s over {run.steady_steps:,} steady steps"
    if decision.floor_met:
        return f"The floor of {rate(floor)} samples/s was met: {reached}."
    missed = percent(1 - run.steady_throughput / floor)
    return f"The floor of {rate(floor)} samples/s was missed by {missed}: {reached}."


def _staleness(updates: int) -> str:
    if not updates:
        return "Each step has all updates (staleness 0): the stages fill and drain in every step."
    lacks = f"{updates:,} update{'s' * (updates != 1)}"
    return f"Each step lacks {lacks} (staleness {updates}): later ones begin while it returns."
