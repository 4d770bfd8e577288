"""The programs of a cluster, each in its room: what compose, Kubernetes or a shell starts."""

from importlib import import_module

import click

from heterps.errors import explained

_PASS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def _role(name: str, module: str, text: str) -> click.Command:
    @click.command(name, context_settings=_PASS, help=text)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @explained
    def run(arguments: tuple[str, ...]) -> int:
        code: int = import_module(module).main(list(arguments))
        return code

    return run


ps = _role("ps", "ps.server", "Run one parameter-server shard.")
node = _role("node", "workers.node", "Run the daemon of one host.")
scheduler = _role("scheduler", "scheduler.service", "Run the scheduler.")
