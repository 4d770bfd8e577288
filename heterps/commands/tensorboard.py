"""TensorBoard event files of a job."""

from pathlib import Path

import click

from heterps.commands import named, options
from heterps.errors import OK


@click.command(
    help=f"""Write a job's curves as TensorBoard event files, until it ends. {options.JOB_HELP}

They go to DIR/JOB: loss, samples a second, utilisation of each stage, metrics. A job that has
ended can be written too. Look at them with `tensorboard --logdir DIR`."""
)
@options.job
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default="tensorboard",
    show_default=True,
    help="Where the folder of the job is made.",
)
@options.cluster
@options.as_json
def tensorboard(job: str | None, directory: Path, as_json: bool) -> int:
    """Write events."""
    from heterps.report import tensorboard as events

    with named.client() as client:
        ended, written = events.follow(client, client.find(job), directory)
    folder = directory / ended.job_id
    if as_json:
        options.print_json({**ended.to_json(), "directory": str(folder), "values": written})
    else:
        click.echo(f"{ended.job_id} {ended.state}: {written:,} values in {folder}")
    return OK
