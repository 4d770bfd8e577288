"""The programs of a cluster, each in its room: what compose, Kubernetes or a shell starts."""

from importlib import import_module

import click

# The rooms parse their own arguments, --help included.
_PASS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _room(name: str, module: str) -> click.Command:
    @click.command(name, context_settings=_PASS)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> int:
        try:
            code: int = import_module(module).main(list(arguments))
        except SystemExit as ended:  # argparse: 0 after --help, 2 for a wrong argument
            return ended.code if isinstance(ended.code, int) else 1
        return code

    return run


ps = _room("ps", "ps.server")
node = _room("node", "workers.node")
scheduler = _room("scheduler", "scheduler.service")
