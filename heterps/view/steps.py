"""What a plan says of steps and of its floor, in sentences."""

from typing import TYPE_CHECKING

from heterps.view.figures import percent, rate

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
    if decision.overhead:
        text = f"The executor takes {percent(decision.overhead)} of the time besides"
        if decision.min_throughput and decision.throughput:
            more = 1 / (1 - decision.overhead) - 1
            text += f", so the plan is made for {percent(more)} more than the floor"
        said.append(f"{text}.")
    return said


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
