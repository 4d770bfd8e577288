"""Another plan beside the running one: what was measured, what each costs, whether to move."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import bullet, heading, indented, table
from heterps.view.figures import money, per_sample, rate

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.problem.plan import Plan
    from scheduler.replanning.measure import Measurement
    from scheduler.replanning.proposal import Proposal


def proposal_report(
    proposal: "Proposal", decision: "Decision", measurement: "Measurement"
) -> RenderableType:
    """All of a proposal to leave the plan of `decision`."""
    parts: list[RenderableType] = []
    if measurement.busy:
        parts += [heading("Measured"), indented(windows_table(decision, measurement))]
    parts += [heading("For the remaining samples"), indented(comparison_table(proposal))]
    parts += [heading("Why"), *(bullet(reason) for reason in proposal.reasons)]
    return Group(*parts)


def proposal_line(proposal: "Proposal", job_id: str) -> RenderableType:
    """A proposal that stands, in the report of its job."""
    return Group(
        heading("Another plan"),
        bullet(proposal.reasons[-1]),
        Text(f"   heterps replan {job_id} shows it", style="dim"),
    )


def windows_table(decision: "Decision", measurement: "Measurement") -> Table:
    """One row a stage, and one for the pipeline; its prediction is that of its slowest stage."""
    made = table("", "type", ">predicted", ">measured", ">ratio", ">spread", ">windows")
    rows = [
        (f"stage {number} computes", stage.type, stage.compute_s, one)
        for number, (stage, one) in enumerate(zip(decision.stages, measurement.busy, strict=False))
    ]
    rows.append(("pipeline", "", 1 / decision.throughput, measurement.pace))
    for name, kind, before, one in rows:
        counts = one.counts
        made.add_row(
            name,
            kind,
            per_sample(before),
            per_sample(one.seconds) if counts else "too few",
            f"{one.seconds / before:.2f}" if counts and before else "",
            f"{one.spread:.0%}" if counts and one.spread else "",
            f"{one.windows:,}",
        )
    return made


def comparison_table(proposal: "Proposal") -> Table:
    """The running plan and the other; rates are what each is expected to make."""
    made = table("", "plan", ">samples/s", ">$/h", ">cost")
    _add(made, "running", proposal, proposal.current, proposal.current_cost)
    if proposal.proposed.feasible and proposal.moves:
        _add(made, "other", proposal, proposal.proposed.plan, proposal.proposed_cost)
        if proposal.moving_s:
            made.add_row(
                "moving", f"{proposal.moving_s:,.0f} s", "", "", money(proposal.moving_cost)
            )
    return made


def _add(made: Table, name: str, proposal: "Proposal", plan: "Plan", cost: float) -> None:
    units = " ".join(f"{stage.units}×{stage.type}" for stage in plan.stages)
    made.add_row(
        name,
        units,
        rate(plan.throughput / proposal.overhead),
        money(plan.price_per_hour),
        money(cost),
    )
