"""Jobs of the running cluster, and those that `heterps train` ran on its own."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import lookup, named, options
from heterps.errors import JOB_FAILED, OK, BestPlanError, HeterpsError, UnreachableError

if TYPE_CHECKING:
    from heterps.client.records import LogText

_SHOWN = 50


@click.command()
@click.option(
    "--last", type=click.IntRange(1), metavar="N", default=_SHOWN, show_default=True, help="Of all."
)
@click.option("--before", metavar="JOB", default="", help="Only those submitted before this job.")
@options.cluster
@options.as_json
def jobs(last: int, before: str, as_json: bool) -> int:
    """List the latest jobs, the latest last."""
    from heterps import report
    from heterps.client import archive

    found = {job.job_id: job for job in archive.jobs()}
    border = found[before].submitted_at if before in found else float("inf")
    problem: HeterpsError | None = None
    try:
        with named.client() as client:
            if before and before not in found:
                border = client.status(before).submitted_at
            live = client.jobs() if before in found else client.jobs(last + 1, before)
    except UnreachableError as error:
        live, problem = [], error
    found |= {job.job_id: job for job in live}
    listed = sorted(
        (job for job in found.values() if job.submitted_at < border),
        key=lambda job: job.submitted_at,
    )
    if not listed and problem is not None:
        raise problem
    shown = listed[-last:]
    if as_json:
        options.print_json([job.to_json() for job in shown])
    elif shown:
        report.show(report.console(), report.jobs_table(shown))
        if len(shown) < len(listed):
            click.echo(f"older ones: heterps jobs --before {shown[0].job_id}")
    else:
        click.echo("no jobs yet; submit one with `heterps submit JOB.yaml`")
    return OK


@click.command(help=f"Show what a job's processes wrote. {options.JOB_HELP}")
@options.job
@options.cluster
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def logs(job: str | None, follow: bool, as_json: bool) -> int:
    """Show logs."""
    from heterps.client import archive
    from heterps.client.records import State

    show = options.print_json_line if as_json else _show

    client, found = lookup.find(job)
    if client is None:
        _echo(archive.logs(found.job_id), show)
        return OK
    with client:
        _echo(client.logs(found.job_id, follow=follow), show)
        ended = client.status(found.job_id)
    if ended.end_reason and ended.state is State.FAILED:
        why = ended.error or ended.reason.partition("\n")[0]
        click.echo(f"{ended.job_id} failed, {ended.end_reason}: {why}", err=True)
        click.echo(f"all about it: heterps status {ended.job_id}", err=True)
    return OK


@click.command(help=f"Stop a job and all its processes. {options.JOB_HELP}")
@options.job
@options.cluster
@options.as_json
def cancel(job: str | None, as_json: bool) -> int:
    """Cancel."""
    with named.client() as client:
        ended = client.cancel(client.find(job))
    if as_json:
        options.print_json(ended.to_json())
    else:
        click.echo(f"{ended.job_id} is {ended.state}")
    return OK


@click.command(help=f"Have a running job go over to another plan. {options.JOB_HELP}")
@options.job
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="As `heterps plan --json` writes it.  [default: the best, by what its run was measured]",
)
@options.cluster
@options.as_json
def move(job: str | None, plan: Path | None, as_json: bool) -> int:
    """Move."""
    with named.client() as client:
        job_id = client.find(job)
        try:
            found = client.move(job_id, plan)
        except BestPlanError as error:
            if as_json:
                options.print_json(client.status(job_id).to_json())
            else:
                click.echo(str(error))
            return OK
    last = found.moves[-1]
    if as_json:
        options.print_json(found.to_json())
    elif last.failed:
        click.echo(f"{found.job_id} keeps its plan, {last.before}: {last.failed}", err=True)
    else:
        paused = f"training paused for {last.seconds:.1f} s at step {last.step}"
        click.echo(f"{found.job_id} went from {last.before} to {last.after}; {paused}")
    return JOB_FAILED if last.failed else OK


def _show(process: str, text: str) -> None:
    click.echo(f"{process} | {text}")


def _echo(chunks: "Iterable[LogText]", show: Callable[[str, str], None]) -> None:
    """Print logs line by line, each with its process; an unfinished line waits for its rest."""
    rest: dict[str, str] = {}
    with suppress(KeyboardInterrupt):
        for chunk in chunks:
            *lines, last = (rest.get(chunk.process, "") + chunk.text).split("\n")
            for text in lines:
                show(chunk.process, text)
            rest[chunk.process] = last
    for process, text in rest.items():
        if text:
            show(process, text)
