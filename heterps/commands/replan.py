"""Whether another plan would pay, by what a run was measured to take."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heterps.commands import options
from heterps.errors import OK, HeterpsError, NoDecisionError

if TYPE_CHECKING:
    from protos.job_pb2 import JobSpec
    from scheduler import Decision
    from scheduler.replanning.measure import Measurement


@click.command(
    help="Say whether another plan would pay for the rest of a job, or for its next run, by what "
    f"it was measured to take. {options.JOB_HELP}"
)
@options.job
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A decision that was exported, instead of a job.",
)
@click.option("--method", metavar="METHOD", default="exact", show_default=True, help="Plan by it.")
@click.option(
    "--remaining",
    type=float,
    metavar="N",
    help="Samples to come.  [default: what the job has left, or all once it has ended]",
)
@click.option(
    "--moving-seconds",
    type=float,
    metavar="S",
    help="What moving takes: draining, saving, starting, pulling.  [default: 42; 0 once it ended]",
)
@click.option(
    "--margin",
    type=float,
    metavar="X",
    default=0.5,
    show_default=True,
    help="Propose only what saves more than 1 + X times the cost of moving.",
)
@click.option(
    "--write",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a job file with the new plan, and the updated profile beside it.",
)
@options.cluster
@options.as_json
def replan(
    job: str | None,
    file: Path | None,
    method: str,
    remaining: float | None,
    moving_seconds: float | None,
    margin: float,
    target: Path | None,
    as_json: bool,
) -> int:
    """Replan."""
    from heterps import report
    from heterps.job.rewrite import write_job
    from heterps.report.proposal import proposal_report
    from scheduler.replanning.proposal import NEXT_RUN, Moving, Threshold
    from scheduler.replanning.replan import propose

    if file is not None and job is not None:
        raise click.UsageError("JOB and --file: expected one of them")
    decision, measurement, left, spec = _of_file(file) if file is not None else _of_job(job)
    moving = NEXT_RUN if left is None and remaining is None else Moving()
    if moving_seconds is not None:
        moving = Moving(0.0, 0.0, moving_seconds, 0.0)
    proposal = propose(
        decision,
        measurement,
        left if remaining is None else remaining,
        method=method,
        moving=moving,
        threshold=Threshold(margin=margin),
    )
    written = write_job(target, spec, decision, proposal) if target is not None else ()
    if as_json:
        found: dict[str, Any] = {"proposal": proposal.to_json()}
        if written:
            found["written"] = [str(path) for path in written]
        options.print_json(found)
        return OK
    console = report.console()
    report.show(console, proposal_report(proposal, decision, measurement))
    if written:
        how = "submit it" if spec is not None else "its schedule belongs into a job file"
        command = f"heterps submit {written[0]}" if spec is not None else f"cat {written[0]}"
        console.print(report.next_commands([(command, how)]), soft_wrap=True)
    return OK


Found = tuple["Decision", "Measurement", float | None, "JobSpec | None"]


def _of_file(file: Path) -> Found:
    from scheduler import Decision
    from scheduler.replanning.measure import Measurement

    decision = Decision.load(file)
    measured = decision.measured
    return decision, Measurement.of_run(measured) if measured else Measurement(), None, None


def _of_job(job: str | None) -> Found:
    """The decision and measurement of a job, and the samples that are left of it if it runs."""
    from heterps.client import archive
    from heterps.commands.lookup import find
    from scheduler import Decision
    from scheduler.replanning.measure import Measurement

    client, found = find(job)
    spec: JobSpec | None = None
    measurement = Measurement()
    if client is None:
        archived = archive.decision(found.job_id)
        if archived is None:
            raise NoDecisionError(f"job {found.job_id}: it has no decision")
        decision = Decision.from_message(archived)
    else:
        with client:
            decision = client.decision(found.job_id)
            measurement = Measurement.from_message(client.replan(found.job_id).measurement)
            spec = client.status_message(found.job_id).job
    if decision.measured is not None and not measurement.counts:
        measurement = Measurement.of_run(decision.measured)
    if found.state.is_final or decision.workload is None:
        return decision, measurement, None, spec
    left = decision.workload.samples - found.samples
    if left <= 0:
        raise HeterpsError(f"job {found.job_id}: it has no samples left to plan for")
    return decision, measurement, left, spec
