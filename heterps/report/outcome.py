"""How a job ended, beside what was predicted."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.client.attempts import trained
from heterps.client.records import Job, State
from heterps.report.checkpoints import clock, lost_text, moved_text, share_text, went_back_text
from heterps.report.cluster import STYLES
from heterps.report.terminal import heading, indented, pairs, table
from heterps.view import decision as view
from heterps.view.failure import DIVERGED, MEANINGS, NOT_THE_JOB, kept_model, shortened
from heterps.view.figures import duration, per_sample
from heterps.view.metrics import metrics_by_split
from heterps.view.plan import EMULATED, ESTIMATED, rests_on_estimates
from heterps.view.steps import floor_note
from heterps.view.table import Column
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
    if job.state is not State.SUCCEEDED:
        parts += _why(job)
    parts += _where(job)
    return Group(*parts)


def job_report(job: Job) -> RenderableType:
    """All that a user must know of one job, on one screen; after a failure above all."""
    lines = [("name", job.name), ("submitted", clock(job.submitted_at))]
    if job.priority:
        lines.append(("priority", str(job.priority)))
    if job.started_at:
        lines.append(("training since", clock(job.started_at)))
    if job.ended_at:
        took = duration(job.ended_at - job.submitted_at)
        lines.append(("ended", f"{clock(job.ended_at)}, {took} after it was submitted"))
    if job.attempt > 1 or job.retries:
        begun = f", from step {job.from_step}" if job.from_step else ""
        lines.append(("attempt", f"{job.attempt} (retries: {job.retries}){begun}"))
    elif job.from_step:
        lines.append(("goes on", f"from step {job.from_step} of an earlier job"))
    if job.total_steps:
        share = f"{job.step / job.total_steps:.0%}"
        if job.state == "succeeded" and job.step < job.total_steps:
            share = "validation ended it"
        lines.append(("trained", f"step {job.step} of {job.total_steps} ({share})"))
    for one, went in zip(job.attempts, trained(job), strict=False):
        text = one.error or one.reason.partition("\n")[0]
        lines.append((f"attempt {one.number} ended", f"{one.end_reason}: {text}"))
        lines.append(("", lost_text(went)))
    for recovery in job.recoveries[-3:]:
        lost = ", ".join(recovery.lost) or "none"
        text = f"{lost}, in {recovery.seconds:.1f} s, from step {recovery.step}: {recovery.reason}"
        lines.append(("replaced", text))
        if recovery.back:
            lines.append(("", went_back_text(recovery)))
    for shared in job.shares:
        if not shared.until:
            lines.append(("shares a unit", share_text(shared)))
    for move in job.moves[-3:]:
        lines.append(("keeps its plan" if move.failed else "moved", moved_text(move)))
    if job.cuts:
        newest = job.cuts[-1]
        text = f"{len(job.cuts)}, the newest of step {newest.step}, {clock(newest.taken_at)}"
        lines.append(("checkpoints", text))
    if job.cut_error:
        lines.append(("checkpoint failed", job.cut_error))
    parts: list[RenderableType] = [
        Text.assemble(job.job_id, " ", (str(job.state), STYLES.get(job.state, ""))),
        pairs(lines),
    ]
    if job.metrics:
        parts += [heading("Quality"), indented(metrics_table(job))]
    why = _why(job) if job.state is not State.SUCCEEDED else []
    if why:
        parts += [heading("Why" if job.state.is_final else "Now"), *why]
    parts += _where(job)
    return Group(*parts)


def job_commands(job: Job) -> list[tuple[str, str]]:
    """What to type next about a job, by how it stands."""
    logs = (f"heterps logs {job.job_id}", "all that its processes wrote")
    if job.state is State.SUCCEEDED:
        return [(f"heterps inspect {job.job_id}", "its plan, and how well it was predicted"), logs]
    if not job.state.is_final:
        follow = (f"heterps logs -f {job.job_id}", "follow what it prints")
        return [follow, (f"heterps cancel {job.job_id}", "stop it")]
    commands = [logs]
    if job.end_reason == "infeasible_plan":
        commands.insert(0, (f"heterps inspect {job.job_id}", "which single changes would help"))
    if job.end_reason == DIVERGED:
        text = "with a lower train.optimizer.learning_rate, or train.clip"
        return [*commands, ("heterps submit JOB.yaml", text)]
    if job.cuts:
        text = f"go on from step {job.cuts[-1].step}"
        commands.append((f"heterps submit --resume {job.job_id}", text))
    if job.end_reason in ("lost_node", "no_capacity"):
        commands.append(("heterps status", "which nodes are alive"))
    if job.end_reason in NOT_THE_JOB:
        text = "start over; with --set retries=2 it does so by itself"
        commands.append(("heterps submit JOB.yaml", text))
    elif job.state is State.FAILED:
        commands.append(("heterps submit JOB.yaml", "once it is mended"))
    return commands


def _why(job: Job) -> list[RenderableType]:
    """The reason, in a word, in a sentence and in full."""
    parts: list[RenderableType] = []
    if job.end_reason and job.state is not State.CANCELLED:
        meaning = MEANINGS.get(job.end_reason, "")
        where = f", in {job.process}" if job.process else ""
        text = Text.assemble((job.end_reason, "bold"), f": {meaning}{where}")
        parts.append(indented(text))
    if job.reason:
        parts.append(indented(Text(shortened(job.reason), overflow="fold")))
    return parts


def _where(job: Job) -> list[RenderableType]:
    """Where the model is; that of a job that diverged is of the step before."""
    which = kept_model(job.state is State.SUCCEEDED, job.end_reason)
    if not job.output or not which:
        return []
    text = f"{which} saved in {job.output}"
    if job.output.startswith(KEPT):
        text = f"the scheduler keeps the {which}; fetch it with `heterps get {job.job_id}`"
    return [indented(Text(text, overflow="fold"))]


def measured_report(decision: "Decision") -> RenderableType:
    """The table of a decision that has run, under its heading."""
    said = [note for note in (view.errors_text(decision), floor_note(decision)) if note]
    return Group(
        heading("Predicted and measured"),
        indented(measured_table(decision)),
        *(indented(Text(note)) for note in said),
    )


def measured_table(decision: "Decision") -> Table:
    """The prediction beside what happened."""
    measured = decision.measured
    assert measured is not None
    mark = f" ({EMULATED})" if measured.emulated else ""
    guess = f" ({ESTIMATED})" if rests_on_estimates(decision) else ""
    made = table("", f">predicted{guess}", f">measured{mark}", ">ratio")
    rows = view.measured(decision)
    for row, busy in view.measured_stages(decision):
        name = f"stage {row.number} busy a sample"
        rows.append(view.FigureRow(name, row.stage.compute_s, busy, per_sample))
    for one in rows:
        made.add_row(one.name, one.text(one.predicted), one.text(one.measured), one.ratio)
    return made


def metrics_table(job: Job) -> Table:
    """Metrics by split: `test_auc` stands in row test and column auc."""
    names, rows = metrics_by_split(job.metrics)
    made = table("split", *(Column(name, number=True) for name in names))
    for row in rows:
        made.add_row(*row)
    return made
