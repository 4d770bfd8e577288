"""Where the time goes: each stage's computation and communication beside the slowest stage's."""

from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import bars, table
from heterps.view import decision as view
from heterps.view.figures import per_sample_in, size
from heterps.view.plan import units_of

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.problem.plan import PlanStage

_COLUMNS = (
    *("stage", "on", "*time a sample"),
    *(">computing", ">communicating", ">slack", ">memory a unit"),
)


def stages(decision: "Decision", palette: Palette) -> Markup:
    """A row a stage; times in one unit."""
    slowest = max(stage.busy_s for stage in decision.stages)
    times = per_sample_in(slowest)
    rows: list[tuple[str | None, ...]] = []
    for row in view.stages(decision):
        stage = row.stage
        colour = palette.of(stage.type)
        drawn = bars(
            (
                (stage.compute_s / slowest if slowest else 0.0, "bar", colour),
                (stage.transfer_s / slowest if slowest else 0.0, "bar thin", colour),
            ),
            1.0,
        )
        rows.append(
            (
                join(tag("b", str(row.number)), " ", row.layers),
                palette.chip(stage.type, f"{units_of(stage)} × {stage.type}"),
                drawn,
                times(stage.compute_s),
                times(stage.transfer_s),
                tag("b", row.slack, class_="warn") if stage.bottleneck else row.slack,
                _memory(decision, stage),
            )
        )
    if decision.plan.ps_units and decision.workload is not None:
        kind = decision.workload.ps_type
        chip = palette.chip(kind, f"{decision.plan.ps_units:,} × {kind}")
        rows.append(("parameter servers", chip, None, "", "", "", ""))
    return table(
        "Stages with their times",
        _COLUMNS,
        rows,
        lambda row: (
            "slow" if row < len(decision.stages) and decision.stages[row].bottleneck else None
        ),
    )


def _memory(decision: "Decision", stage: "PlanStage") -> str:
    kind = view.offered_type(decision, stage.type)
    of = f" of {size(kind.memory_bytes)}" if kind is not None else ""
    return f"{size(stage.memory_bytes)}{of}"
