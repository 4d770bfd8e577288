"""The page of all jobs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from heterps.client.records import Job, State
from heterps.console.pages.parts import ago, cost_text, progress, state_chip
from heterps.html.markup import Child, Markup, join, tag
from heterps.html.parts import table
from heterps.view.figures import rate

if TYPE_CHECKING:
    from scheduler import Decision

PAGE = 50
_COLUMNS = (
    *("job", "state", "*trained", ">loss", ">samples/s"),
    *(">cost so far, predicted", ">age", ""),
)


def jobs_table(jobs: Sequence[Job], decisions: Mapping[str, "Decision"]) -> Markup:
    """A row a job, in the order given."""
    rows = [_row(job, decisions.get(job.job_id)) for job in jobs]
    return table("Jobs, the latest first", _COLUMNS, rows)


def _row(job: Job, decision: "Decision | None") -> tuple[Child, ...]:
    link = tag("a", job.name or job.job_id, href=f"/jobs/{job.job_id}", id=f"to-{job.job_id}")
    why = job.reason.splitlines()[0] if job.reason and job.state is not State.SUCCEEDED else ""
    quality = ", ".join(f"{k} {v:.4f}" for k, v in job.metrics.items() if k.endswith("auc"))
    note = tag("small", why or quality, class_="note") if why or quality else None
    cancel = None
    if not job.state.is_final:
        cancel = tag(
            "a",
            "Cancel…",
            tag("span", f" {job.name}", class_="hidden"),
            href=f"/jobs/{job.job_id}/cancel",
            id=f"cancel-{job.job_id}",
            class_="button quiet",
        )
    return (
        join(link, tag("small", job.job_id, class_="id")),
        join(state_chip(job.state), note),
        progress(job),
        f"{job.loss:.4f}" if job.step else "",
        rate(job.samples_per_s) if job.step else "",
        cost_text(job, decision),
        ago(job.submitted_at),
        cancel,
    )
