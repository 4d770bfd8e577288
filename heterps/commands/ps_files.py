"""`heterps ps save`, `load`, `export`, `publish`, `follow`, `shrink` and `scale`."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from heterps.commands import complete, options
from heterps.commands.shards import addresses_of, connected, explained, shards_option
from heterps.errors import OK, HeterpsError

if TYPE_CHECKING:
    from ps import ParameterClient, Publisher

_CALL_S = 30.0
_place = click.argument("place", shell_complete=complete.files)
_interval = click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Time between rounds.",
)
_once = click.option("--once", is_flag=True, help="One round, then end.")
_prefix = click.option(
    "--prefix", default="", metavar="TEXT", help="Only tables whose names begin so."
)


@click.command()
@shards_option
@_place
@click.option(
    "--mode",
    type=click.Choice(["checkpoint", "delta", "base", "serving"]),
    default="checkpoint",
    show_default=True,
    help="checkpoint and delta are for training; base and serving have weights alone.",
)
@click.option("--since", metavar="PLACE", help="The save that a delta or serving save builds on.")
@_prefix
@options.as_json
def save(
    shards: str | None, place: str, mode: str, since: str | None, prefix: str, as_json: bool
) -> int:
    """Write a checkpoint to PLACE, a path or URL that all shards see as one."""
    from ps.checkpoint.tables import read_checkpoint, read_save, save_of

    began = time.monotonic()
    with _ready(shards) as client:
        client.save(place, mode=mode, since=since, prefix=prefix)
        made, checksum = read_checkpoint(place), read_save(place, save_of)
    rows, size = sum(f.rows for f in made.files), sum(f.bytes for f in made.files)
    found = {"place": place, "id": made.id, "mode": mode, "rows": rows, "bytes": size}
    if as_json:
        options.print_json({**found, "checksum": checksum, "tables": sorted(made.tables)})
    else:
        click.echo(f"saved {_rows(rows)} ({size:,} bytes) in {_since(began)} to {place}")
    return OK


@click.command()
@shards_option
@_place
@options.as_json
def load(shards: str | None, place: str, as_json: bool) -> int:
    """Replace the tables of a checkpoint by its rows. No push may be under way."""
    began = time.monotonic()
    with _ready(shards) as client:
        rows = client.load(place)
    if as_json:
        options.print_json({"place": place, "rows": rows})
    else:
        click.echo(f"loaded {_rows(rows)} in {_since(began)} from {place}")
    return OK


@click.command()
@click.argument("checkpoint")
@click.argument("target")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "safetensors"]),
    default="parquet",
    show_default=True,
)
@click.option(
    "--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True
)
@click.option("--table", "tables", multiple=True, metavar="NAME", help="Only this. Repeatable.")
@click.option("--dense", metavar="FILE", help="A safetensors file to put beside the tables.")
@click.option("--replace", is_flag=True, help="An earlier export at TARGET.")
@options.as_json
def export(
    checkpoint: str,
    target: str,
    kind: str,
    dtype: str,
    tables: tuple[str, ...],
    dense: str | None,
    replace: bool,
    as_json: bool,
) -> int:
    """Write the weights of CHECKPOINT to the folder TARGET as Parquet or safetensors.

    CHECKPOINT is a save of any mode, with those it builds on, or a place that `publish` writes
    to. Both may be URLs.
    """
    from ps import export_checkpoint

    began = time.monotonic()
    with explained():
        made = export_checkpoint(
            checkpoint, target, kind, dtype, tables or None, dense=dense, replace=replace
        )
    if as_json:
        options.print_json(asdict(made))
        return OK
    for file in made.files:
        rows = f"{_rows(file.rows)}, " if file.table else ""
        click.echo(f"{file.name}: {rows}{file.bytes:,} bytes")
    click.echo(f"exported {_rows(made.rows)} in {_since(began)} to {target}")
    return OK


@click.command()
@shards_option
@_place
@_interval
@_once
@click.option(
    "--full-every",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Deltas between bases.",
)
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Bases to keep.")
@_prefix
@options.as_json
def publish(
    shards: str | None,
    place: str,
    interval_s: float,
    once: bool,
    full_every: int,
    keep: int,
    prefix: str,
    as_json: bool,
) -> int:
    """Write weights to PLACE for followers, then again and again what has changed."""
    from ps import Publisher

    with _ready(shards) as client:
        publisher = Publisher(client, place, full_every=full_every, keep=keep, prefix=prefix)
        _repeat(lambda: _publish_once(publisher, as_json), interval_s, once)
    return OK


def _publish_once(publisher: "Publisher", as_json: bool) -> None:
    done = publisher.publish()
    if as_json:
        _line(asdict(done))
    elif done.saves:
        names = ", ".join(done.saves)
        click.echo(f"published {names}: {_rows(done.rows)} in {done.seconds:.2f} s")
    else:
        click.echo("nothing has changed")


@click.command()
@_place
@_interval
@_once
@click.option("--table", "tables", multiple=True, metavar="NAME", help="Only this. Repeatable.")
@options.as_json
def follow(
    place: str, interval_s: float, once: bool, tables: tuple[str, ...], as_json: bool
) -> int:
    """Read what `publish` writes to PLACE as a serving process would; tell what was applied.

    With --json one object a line.
    """
    from ps import Follower

    follower: Follower | None = None

    def look() -> None:
        nonlocal follower
        if follower is None:
            follower = Follower(place, tables=tables or None)
            applied = follower.loaded
        else:
            applied = follower.poll()
        rows = {name: follower.rows(name) for name in follower.tables}
        if as_json:
            _line({**asdict(applied), "tables": rows, "bytes": follower.nbytes})
        elif applied:
            names = ", ".join(([applied.base] if applied.base else []) + list(applied.deltas))
            click.echo(
                f"applied {names}: {_rows(applied.rows)}, {applied.removed:,} removed in "
                f"{applied.seconds:.2f} s; now {_rows(sum(rows.values()))}, "
                f"{follower.nbytes:,} bytes"
            )

    with explained():
        _repeat(look, interval_s, once)
    return OK


@click.command()
@shards_option
@click.argument("table")
@click.option(
    "--step", type=click.IntRange(0), default=0, help="The trainer's, for tables with ttl_steps."
)
@click.option("--no-decay", is_flag=True, help="Leave scores as they are.")
@options.as_json
def shrink(shards: str | None, table: str, step: int, no_decay: bool, as_json: bool) -> int:
    """Apply the eviction rules of TABLE now."""
    with _ready(shards) as client:
        client.spec(table)  # so that a wrong name is told with the near ones
        removed = client.shrink(table, step=step, decay=not no_decay)
    if as_json:
        options.print_json({"table": table, "removed": removed})
    else:
        click.echo(f"{table}: removed {removed:,} keys")
    return OK


@click.command()
@shards_option
@click.option(
    "--to",
    required=True,
    metavar="HOST:PORT,...",
    help="All shards from now on: those that stay, and new, empty ones.",
)
@options.as_json
def scale(shards: str | None, to: str, as_json: bool) -> int:
    """Spread the tables over other shards while training goes on.

    Running clients find the new shards by themselves. Repeat it if it fails.
    """
    began = time.monotonic()
    targets = addresses_of(to, "--to")
    if len(set(targets)) < len(targets):
        raise click.BadParameter("an address is named twice", param_hint="--to")
    with _ready(shards) as client:
        before = len(client.addresses)
        moved = client.reshard(targets)
    if as_json:
        options.print_json({"shards": targets, "moved_rows": moved})
    else:
        click.echo(f"{before} -> {len(targets)} shards: moved {_rows(moved)} in {_since(began)}")
    return OK


COMMANDS: tuple[click.Command, ...] = (save, load, export, publish, follow, shrink, scale)


@contextmanager
def _ready(shards: str | None) -> "Iterator[ParameterClient]":
    """A client for calls that may take a while, of shards that have just answered."""
    with connected(shards) as client:
        client.stats()
    with connected(shards, _CALL_S) as client:
        yield client


def _repeat(one: Callable[[], None], interval_s: float, once: bool) -> None:
    """Run it now and then; what fails after the first time is told and tried again."""
    with explained():
        one()
    while not once:
        time.sleep(interval_s)
        try:
            with explained():
                one()
        except HeterpsError as error:
            click.echo(f"error: {error}", err=True)


def _line(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False))


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.2f} s"
