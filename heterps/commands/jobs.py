"""Jobs of the running cluster, and those that `heterps train` ran on its own."""

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from heterps.commands import options
from heterps.errors import OK, HeterpsError, UnknownJobError, UnreachableError

if TYPE_CHECKING:
    from heterps.client import Client
    from heterps.records import Job, LogText


@click.command()
@options.as_json
def jobs(as_json: bool) -> int:
    """List the jobs, the latest last."""
    from heterps import history, report

    found = history.jobs()
    problem: HeterpsError | None = None
    try:
        with _client() as client:
            live = client.jobs()
    except UnreachableError as error:
        live, problem = [], error
    ids = {job.job_id for job in live}
    listed = sorted(
        [*(job for job in found if job.job_id not in ids), *live], key=lambda job: job.submitted_at
    )
    if not listed and problem is not None:
        raise problem
    if as_json:
        options.print_json([job.to_json() for job in listed])
    elif listed:
        report.show(report.console(), report.jobs_table(listed))
    else:
        click.echo("no jobs yet; submit one with `heterps submit JOB.yaml`")
    return OK


@click.command(help=f"Show what a job's processes wrote. {options.JOB_HELP}")
@options.job
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
def logs(job: str | None, follow: bool) -> int:
    """Show logs."""
    from heterps import history

    client, found = _find(job)
    if client is None:
        _echo(history.logs(found.job_id))
        return OK
    with client:
        _echo(client.logs(found.job_id, follow=follow))
    return OK


@click.command(help=f"Stop a job and all its processes. {options.JOB_HELP}")
@options.job
@options.as_json
def cancel(job: str | None, as_json: bool) -> int:
    """Cancel."""
    with _client() as client:
        ended = client.cancel(client.find(job))
    if as_json:
        options.print_json(ended.to_json())
    else:
        click.echo(f"{ended.job_id} is {ended.state}")
    return OK


@click.command(
    help=f"Show a job's plan, the reasons for it, and how it turned out. {options.JOB_HELP}"
)
@options.job
@options.as_json
def inspect(job: str | None, as_json: bool) -> int:
    """Inspect."""
    from heterps import history, report
    from heterps.commands import following
    from heterps.progress import line
    from scheduler import Decision

    client, found = _find(job)
    if client is None:
        kept = history.decision(found.job_id)
        decision = Decision.from_message(kept) if kept is not None else None
    else:
        with client:
            decision = following.decision_of(client, found.job_id)
    if as_json:
        options.print_json(following.result_json(found, decision))
        return OK
    console = report.console()
    if decision is not None:
        report.show(console, report.decision_report(decision))
    report.show(console, report.outcome_report(found, decision))
    if not found.state.is_final:
        console.print(f"  {line(found)}")
    commands = [(f"heterps logs {found.job_id}", "what its processes wrote")]
    if not found.state.is_final:
        commands.append((f"heterps cancel {found.job_id}", "stop it"))
    console.print(report.next_commands(commands), soft_wrap=True)
    return OK


def _client() -> "Client":
    from heterps.client import Client

    return Client()


def _find(prefix: str | None) -> "tuple[Client | None, Job]":
    """A job, with a client of the cluster that has it; None for a kept one.

    The latest job is the latest of both.
    """
    from heterps import history
    from heterps.client import match

    kept = history.jobs()
    live: list[Job] = []
    client: Client | None = None
    problem: HeterpsError | None = None
    try:
        client = _client()
        live = client.jobs()
    except UnreachableError as error:
        problem = error
        if client is not None:
            client.close()
    known = {job.job_id: job for job in [*kept, *live]}
    order = sorted(known.values(), key=lambda job: job.submitted_at)
    try:
        found = known[match(prefix, [job.job_id for job in order])]
    except UnknownJobError:
        if problem is not None:  # the cluster that does not answer may know it
            known_here = f"job {prefix!r} is not among those kept here, and " if prefix else ""
            raise UnreachableError(f"{known_here}{problem}") from None
        raise
    if any(job.job_id == found.job_id for job in live):
        return client, found
    if client is not None and problem is None:
        client.close()
    return None, found


def _echo(chunks: "Iterable[LogText]") -> None:
    """Print logs line by line, each with its process; an unfinished line waits for its rest."""
    rest: dict[str, str] = {}
    with suppress(KeyboardInterrupt):
        for chunk in chunks:
            *lines, last = (rest.get(chunk.process, "") + chunk.text).split("\n")
            for text in lines:
                click.echo(f"{chunk.process} | {text}")
            rest[chunk.process] = last
    for process, text in rest.items():
        if text:
            click.echo(f"{process} | {text}")
