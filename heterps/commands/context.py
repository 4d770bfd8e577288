"""Contexts: clusters with a name, and the one that commands use."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from heterps.commands import complete, options
from heterps.errors import OK

if TYPE_CHECKING:
    from heterps.home.contexts import Contexts

_name = click.argument("name", shell_complete=complete.contexts)


@click.group()
def context() -> None:
    """Name clusters, and choose the one that commands use.

    A command uses the first of: its --scheduler or --context, $HETERPS_CONTEXT,
    $HETERPS_SCHEDULER, the current context, the cluster that `heterps up` started. The context
    `local` is always the latter.
    """


@context.command("list")
@options.as_json
def list_(as_json: bool) -> int:
    """List the contexts; the one in use is marked."""
    from heterps import report
    from heterps.home import contexts

    listed = contexts.load()
    used = _in_use(listed)
    entries = [_entry(listed, name, used) for name in listed.all()]
    if as_json:
        options.print_json(entries)
        return OK
    from heterps.report.terminal import table

    made = table("", "!context", "!scheduler", "ca", "token file")
    for one in entries:
        cells = (one[key] or "" for key in ("scheduler", "ca", "token_file"))
        made.add_row("*" if one["current"] else "", one["name"], *cells)
    report.show(report.console(), made)
    if used not in listed.all():
        listed.get(used, "HETERPS_CONTEXT" if "HETERPS_CONTEXT" in os.environ else "current")
    _warn_of("HETERPS_SCHEDULER")
    return OK


@context.command()
@click.argument("name", required=False, shell_complete=complete.contexts)
@options.as_json
def show(name: str | None, as_json: bool) -> int:
    """Show a context: by default the one in use."""
    from heterps.home import contexts

    listed = contexts.load()
    used = _in_use(listed)
    name = name or used
    if name != contexts.LOCAL:
        listed.get(name, "heterps context show")
    entry = _entry(listed, name, used)
    if as_json:
        options.print_json(entry)
        return OK
    for key, value in entry.items():
        if key != "current" and value:
            click.echo(f"{key.replace('_', ' '):10}  {value}")
    if name == contexts.LOCAL and not entry["scheduler"]:
        click.echo("no cluster is up here; start one with `heterps up`")
    return OK


@context.command()
@_name
@options.as_json
def use(name: str, as_json: bool) -> int:
    """Make NAME the one that commands use; `local` for the cluster of `heterps up`."""
    from heterps.home import contexts

    contexts.use(name)
    if as_json:
        return _print_entry(name)
    click.echo(f"commands use {name} now")
    _warn_of("HETERPS_CONTEXT")
    _warn_of("HETERPS_SCHEDULER")
    return OK


@context.command("set")
@_name
@click.option("--scheduler", metavar="HOST:PORT", help="Where it listens; a new context needs it.")
@click.option("--ca", type=click.Path(dir_okay=False), help="Who signed its certificates.")
@click.option(
    "--cert", type=click.Path(dir_okay=False), help="Certificate of nodes and shards started here."
)
@click.option("--key", type=click.Path(dir_okay=False), help="The key of --cert.")
@click.option(
    "--token-file", type=click.Path(dir_okay=False), help="A file with the cluster's token."
)
@options.as_json
def set_(name: str, as_json: bool, **given: str | None) -> int:
    """Add a context, or change what is given of one.

    The files stay where they are: the context keeps their paths, and never a token.
    """
    from heterps.home import contexts

    values = {key: value for key, value in given.items() if value is not None}
    for key in values.keys() - {"scheduler"}:
        values[key] = os.path.abspath(os.path.expanduser(values[key]))
    made = contexts.set_context(name, values)
    if as_json:
        return _print_entry(name)
    click.echo(f"context {name}: scheduler at {made.scheduler}")
    if contexts.load().current != name:
        click.echo(f"use it with `heterps context use {name}`")
    return OK


@context.command()
@_name
@options.as_json
def remove(name: str, as_json: bool) -> int:
    """Forget a context; the files that it names stay."""
    from heterps.home import contexts

    was_current = contexts.remove(name)
    if as_json:
        options.print_json({"name": name, "removed": True, "was_current": was_current})
        return OK
    click.echo(f"context {name} is removed")
    if was_current:
        click.echo("commands use the cluster of `heterps up`; `heterps context use NAME` chooses")
    return OK


def _print_entry(name: str) -> int:
    """The context as `heterps context show --json` has it."""
    from heterps.home import contexts

    listed = contexts.load()
    options.print_json(_entry(listed, name, _in_use(listed)))
    return OK


def _warn_of(variable: str) -> None:
    """Say so where the environment names another cluster."""
    if value := os.environ.get(variable):
        click.echo(f"{variable}={value} goes before it here; `unset {variable}` ends that")


def _in_use(listed: "Contexts") -> str:
    """The name of the context that commands use here."""
    from heterps.home import contexts

    return os.environ.get("HETERPS_CONTEXT") or listed.current or contexts.LOCAL


def _entry(listed: "Contexts", name: str, used: str) -> dict[str, Any]:
    """A context as JSON shows it."""
    from heterps.home import contexts, local

    if name != contexts.LOCAL:
        values = {key: value or None for key, value in asdict(listed.named[name]).items()}
        return {"name": name, "current": name == used, **values}
    running = local.running()
    values = dict.fromkeys(("scheduler", *contexts.KEYS.values()))
    values["scheduler"] = running.address if running else None
    return {"name": name, "current": name == used, **values}
