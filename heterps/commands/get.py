"""Fetching what a job left behind."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import lookup, options
from heterps.errors import OK

if TYPE_CHECKING:
    from heterps.client.download import JobFiles
    from heterps.client.records import Job


@click.command(help=f"Fetch a job's model, metrics.json and decision.json. {options.JOB_HELP}")
@options.job
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="A new or empty folder.  [default: one of the job's name, here]",
)
@options.cluster
@options.as_json
def get(job: str | None, to: Path | None, as_json: bool) -> int:
    """Get."""
    from heterps import report

    client, found = lookup.find(job)
    if client is None:
        fetched = _archived(found, to)
    else:
        with client:
            fetched = client.get(found.job_id, to)
    if as_json:
        options.print_json(fetched.to_json())
        return OK
    click.echo(f"{len(fetched.files)} files in {fetched.folder}")
    if fetched.note:
        click.echo(f"no model: {fetched.note}")
    commands = [(f"heterps inspect {fetched.job_id}", "its plan and how it went")]
    if fetched.model:
        use = f"python -c \"import heterps; model = heterps.load('{fetched.folder}')\""
        commands.insert(0, (use, "use the model"))
    else:
        commands.append((f"heterps logs {fetched.job_id}", "what its processes wrote"))
    report.console().print(report.next_commands(commands), soft_wrap=True)
    return OK


def _archived(job: "Job", to: Path | None) -> "JobFiles":
    """Of a job that `train` ran: its model is on this machine already."""
    from heterps.client import archive
    from heterps.client.download import Download
    from scheduler import Decision

    download = Download(job, to or Path(job.job_id))
    download.open()
    download.wanted([])
    decision = archive.decision(job.job_id)
    return download.close(Decision.from_message(decision) if decision is not None else None)
