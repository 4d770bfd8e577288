"""How a job ended, beside what was predicted."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.figures import duration, money, per_sample, rate
from heterps.placement import EMULATED, ESTIMATED, rests_on_estimates
from heterps.reasons import shortened
from heterps.records import Job, State
from heterps.report.cluster import STYLES
from heterps.report.terminal import heading, indented, table
from protos.naming import KEPT

if TYPE_CHECKING:
    from scheduler import Decision


def outcome_report(job: Job, decision: "Decision | None") -> RenderableType:
    """How a job ended: prediction against measurement, metrics, where the model is."""
    parts: list[RenderableType] = []
    if decision is not None and decision.measured is not None:
        parts.append(measured_report(decision))
    if job.metrics:
        parts += [heading("Quality"), indented(metrics_table(job))]
    parts.append(heading("Job"))
    took = f" in {duration(job.ended_at - job.submitted_at)}" if job.ended_at else ""
    state = Text.assemble("  ", job.job_id, " ", (str(job.state), STYLES.get(job.state, "")), took)
    parts.append(state)
    if job.reason and job.state is not State.SUCCEEDED:
        parts.append(indented(Text(shortened(job.reason), overflow="fold")))
    if job.output and job.state is State.SUCCEEDED:
        where = f"model saved in {job.output}"
        if job.output.startswith(KEPT):
            where = f"the scheduler keeps the model; fetch it with `heterps get {job.job_id}`"
        parts.append(indented(Text(where, overflow="fold")))
    return Group(*parts)


def measured_report(decision: "Decision") -> RenderableType:
    """The table of a decision that has run, under its heading."""
    return Group(heading("Predicted and measured"), indented(measured_table(decision)))


def measured_table(decision: "Decision") -> Table:
    """The prediction beside what happened."""
    measured = decision.measured
    assert measured is not None
    mark = f" ({EMULATED})" if measured.emulated else ""
    guess = f" ({ESTIMATED})" if rests_on_estimates(decision) else ""
    made = table("", f">predicted{guess}", f">measured{mark}", ">ratio")
    rows = [
        ("throughput, samples/s", decision.throughput, measured.throughput, rate),
        ("price an hour", decision.price_per_hour, measured.price_per_hour, money),
        ("cost of the training", decision.cost, measured.cost, money),
    ]
    for number, (stage, busy) in enumerate(zip(decision.stages, measured.stage_s, strict=False)):
        rows.append((f"stage {number} busy a sample", stage.compute_s, busy, per_sample))
    for name, before, after, shape in rows:
        made.add_row(name, shape(before), shape(after), f"{after / before:.2f}" if before else "")
    return made


def metrics_table(job: Job) -> Table:
    """Metrics by split: `test_auc` stands in row test and column auc."""
    splits: dict[str, dict[str, float]] = {}
    for name, value in job.metrics.items():
        split, _, metric = name.partition("_")
        splits.setdefault(split if metric else "", {})[metric or name] = value
    names = list(dict.fromkeys(metric for values in splits.values() for metric in values))
    made = table("split", *(f">{name}" for name in names))
    for split, values in splits.items():
        made.add_row(split, *(f"{values[n]:.4f}" if n in values else "" for n in names))
    return made
