"""The web console."""

import click

from heterps.commands import named, options
from heterps.errors import OK


@click.command()
@click.option(
    "--bind",
    default="127.0.0.1:8700",
    metavar="HOST:PORT",
    show_default=True,
    help="Where it listens; port 0 picks a free one. Beyond loopback it needs TLS and a token.",
)
@click.option("--ready-file", metavar="FILE", hidden=True)
@options.cluster
def console(bind: str, ready_file: str | None) -> int:
    """Show jobs, decisions, nodes and prices in a browser."""
    from heterps.console.server import serve
    from heterps.home.target import Target

    serve(named.target() or Target.find(), bind, ready_file)
    return OK
