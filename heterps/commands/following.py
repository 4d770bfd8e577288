"""What `train` and `submit --wait` do once a job is queued."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from heterps import report
from heterps.client.client import Client
from heterps.client.records import Job, State
from heterps.errors import CANCELLED, INFEASIBLE, JOB_FAILED, OK, NoDecisionError
from heterps.report.progress import follow

if TYPE_CHECKING:
    from scheduler import Decision

_PLANNED = (State.STARTING, State.RUNNING, State.SUCCEEDED, State.FAILED, State.CANCELLED)


def follow_job(console: Console, client: Client, job_id: str) -> tuple[Job, "Decision | None"]:
    """Show the plan once there is one, the progress, and the outcome; how it ended."""
    shown = False

    def show_plan(job: Job) -> None:
        nonlocal shown
        if shown or job.state not in _PLANNED:
            return
        shown = True
        decision = decision_of(client, job_id)
        if decision is not None:
            report.show(console, report.decision_report(decision))

    job = follow(console, client.watch(job_id), show_plan)
    decision = decision_of(client, job_id)
    report.show(console, report.outcome_report(job, decision))
    return job, decision


def decision_of(client: Client, job_id: str) -> "Decision | None":
    """A job's decision; None where it came to none."""
    try:
        return client.decision(job_id)
    except NoDecisionError:
        return None


def exit_code(job: Job, decision: "Decision | None") -> int:
    """How a command that waited for a job exits."""
    if job.state is State.SUCCEEDED:
        return OK
    if job.state is State.CANCELLED:
        return CANCELLED
    return INFEASIBLE if decision is not None and not decision.feasible else JOB_FAILED


def result_json(job: Job, decision: "Decision | None") -> dict[str, Any]:
    """A job and what was decided for it, for programs."""
    return {**job.to_json(), "decision": decision.to_json() if decision is not None else None}
