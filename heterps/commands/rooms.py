"""The programs of a cluster, each in its room: what compose, Kubernetes or a shell starts."""

import os
from importlib import import_module

import click

from heterps.errors import UnreachableError

_HELP = {"-h", "--help"}
_SCHEDULER = "--scheduler"
_FOUND_IN = "--found-in"  # a node's: a file that tells it
# The rooms parse their own arguments, --help included.
_PASS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _room(name: str, module: str) -> click.Command:
    @click.command(name, context_settings=_PASS)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> int:
        said = _with_scheduler(name, list(arguments))
        try:
            code: int = import_module(f"{module}.__main__").main(said)
        except SystemExit as ended:  # argparse: 0 after --help, 2 for a wrong argument
            return ended.code if isinstance(ended.code, int) else 1
        return code

    return run


def _with_scheduler(name: str, arguments: list[str]) -> list[str]:
    """The arguments, with the scheduler that they leave to be found.

    A node always belongs to one. A shard stands alone unless $HETERPS_CONTEXT names a cluster.
    """
    said = {one.partition("=")[0] for one in arguments}
    names = (_SCHEDULER, _FOUND_IN)
    # As argparse does.
    given = any(len(one) > 2 and name.startswith(one) for name in names for one in said)
    if given or name == "scheduler" or _HELP & set(arguments):
        return arguments
    from heterps.home.target import CONTEXT, Target

    try:
        target = Target.find() if name == "node" else Target.named()
    except UnreachableError:
        if os.environ.get(CONTEXT):
            raise
        return arguments  # the room says what it misses
    if target is None:
        return arguments
    click.get_current_context().with_resource(target.exported())
    click.echo(f"heterps {name}: joins the scheduler at {target}", err=True)
    return [*arguments, _SCHEDULER, target.address]


ps = _room("ps", "ps.server")
node = _room("node", "workers.node")
scheduler = _room("scheduler", "scheduler.service")
