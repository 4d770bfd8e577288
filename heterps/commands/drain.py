"""`heterps drain`: a node that is to end."""

import click

from heterps.commands import named, options
from heterps.errors import OK


@click.command()
@click.argument("node")
@click.option(
    "--notice",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Until it ends, whatever runs there.",
)
@options.cluster
@options.as_json
def drain(node: str, notice: float, as_json: bool) -> int:
    """Have NODE, an id of `heterps status`, take nothing new and end once its jobs have left it."""
    with named.client() as client:
        client.drain(node, notice)
    if as_json:
        options.print_json({"node_id": node, "notice_s": notice})
    else:
        click.echo(f"{node} drains: it ends once no job runs there, in {notice:g} s at most")
    return OK
