"""`heterps ps`: runs a shard, or works with shards that run and their saves."""

from typing import Any

import click

from heterps.commands import options, ps_files
from heterps.commands.rooms import ps as room
from heterps.commands.shards import ANSWER_S, addresses_of, connected, shards_option
from heterps.errors import OK, UNREACHABLE

_KEYS = 100  # listed where nobody says how many


class _Ps(click.Group):
    """Words are commands; options alone are the shard's own, which parses them itself."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        completing = bool(extra.get("resilient_parsing"))
        if completing or (args and not args[0].startswith("-")):
            return super().make_context(info_name, args, parent, **extra)
        if {"-h", "--help"} & set(args):
            click.echo(f"{self._look()}\n")
        return room.make_context(info_name, args, parent, **extra)

    def _look(self) -> str:
        lines = [f"  heterps ps {n:7} {c.get_short_help_str(70)}" for n, c in self.commands.items()]
        return "\n".join(
            ["Look into shards that run, and move their tables:", *lines, "", "Or run one:"]
        )


@click.group(cls=_Ps)
def ps() -> None:
    """Look into the parameter-server shards that run; `heterps ps --help` tells how to run one."""


for _command in ps_files.COMMANDS:
    ps.add_command(_command)


@ps.command()
@shards_option
@options.as_json
def stats(shards: str | None, as_json: bool) -> int:
    """Show what each shard holds and does. Exits with 4 when one does not answer."""
    from concurrent.futures import ThreadPoolExecutor

    from heterps.report.ps import ShardReport, stats_report

    addresses = addresses_of(shards)
    with ThreadPoolExecutor(min(32, len(addresses))) as pool:
        found: list[ShardReport] = list(pool.map(_ask, addresses))
    if as_json:
        options.print_json({"shards": [one.to_json() for one in found]})
    else:
        from heterps import report

        report.show(report.console(), stats_report(found))
    return OK if all(one.stats is not None for one in found) else UNREACHABLE


@ps.command()
@shards_option
@click.argument("table")
@click.option("--limit", type=click.IntRange(1), default=_KEYS, show_default=True)
@options.as_json
def keys(shards: str | None, table: str, limit: int, as_json: bool) -> int:
    """List keys that have a row in TABLE, in no order."""
    with connected(shards) as client:
        found = [int(key) for key in client.keys(table, limit)]
    if as_json:
        options.print_json({"table": table, "keys": found})
    else:
        for key in found:
            click.echo(key)
    return OK


@ps.command(context_settings={"ignore_unknown_options": True})  # keys may be below zero
@shards_option
@click.argument("table")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@options.as_json
def get(shards: str | None, table: str, keys: tuple[str, ...], as_json: bool) -> int:
    """Print the rows of keys. A key without a row reads what it would begin with."""
    import numpy as np

    wanted = np.array([_key(text) for text in keys], np.uint64)
    with connected(shards) as client:
        rows = client.pull(table, wanted, read_only=True)
    # The shortest decimals that are the same float32.
    values = [[float(str(value)) for value in row] for row in rows]
    if as_json:
        listed = [{"key": int(k), "values": v} for k, v in zip(wanted, values, strict=True)]
        options.print_json({"table": table, "dim": rows.shape[1], "rows": listed})
    else:
        for text, row in zip(keys, values, strict=True):
            click.echo(f"{text}: {' '.join(f'{value:g}' for value in row)}")
    return OK


def _ask(address: str) -> Any:
    """What one shard says; others are shown when it does not answer."""
    from heterps.report.ps import ShardReport
    from ps import ParameterClient, ShardError

    with ParameterClient([address], timeout_s=ANSWER_S) as client:
        try:
            return ShardReport(address, client.stats()[0])
        except ShardError as error:
            # It is alone here, so the number that the error gives it says nothing.
            told = str(error).removeprefix(f"parameter-server shard 0 ({address}) ")
            return ShardReport(address, None, told)


def _key(text: str) -> int:
    """A key as the shards know it: signed ones keep their bits."""
    try:
        number = int(text, 0)
    except ValueError:
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise click.BadParameter(f"{text!r}: expected an integer of 64 bits", param_hint="KEY")
    return number % (1 << 64)
