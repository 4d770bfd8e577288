"""TLS certificates and a token."""

from pathlib import Path

import click

from heterps.commands import options
from heterps.errors import OK


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name or address that servers are called by. May be repeated.",
)
@click.option("--days", type=click.IntRange(1, 3650), default=825, show_default=True)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--if-missing", is_flag=True, help="Do nothing where the files are there already.")
@options.as_json
def certs(
    directory: Path,
    hosts: tuple[str, ...],
    days: int,
    force: bool,
    if_missing: bool,
    as_json: bool,
) -> int:
    """Make a certificate authority, a server certificate and a token in DIRECTORY.

    Copy the folder to every machine of the cluster and set the printed variables there.
    """
    from heterps.home import certs as files

    if if_missing and all((directory / name).exists() for name in files.FILES):
        if as_json:
            options.print_json(
                {"directory": str(directory.absolute()), "made": [], "environment": {}}
            )
        else:
            click.echo(f"{directory}: there already")
        return OK
    environment = files.make(directory, hosts, days, replace=force)
    if as_json:
        made = {"directory": str(directory.absolute()), "made": list(files.FILES)}
        options.print_json({**made, "environment": environment})
        return OK
    click.echo(f"# made {', '.join(files.FILES)} in {directory}; every role and client needs:")
    for name, value in environment.items():
        click.echo(f"export {name}={value}")
    return OK
