"""The cluster that a command's options name, and a client of it."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from heterps.client.client import Client
    from heterps.home.target import Target

_META = "heterps."


def cluster() -> tuple[str | None, str | None]:
    """The address and the context that the options of the running command name."""
    ctx = click.get_current_context(silent=True)
    named = ctx.meta if ctx is not None else {}
    address, context = named.get(_META + "scheduler"), named.get(_META + "context")
    if address is not None and context is not None:
        raise click.UsageError(f"--scheduler {address} and --context {context}: expected one")
    if address is not None:
        from heterps.home.contexts import check_address

        check_address(address, "--scheduler")
    return address, context


def target() -> "Target | None":
    """The cluster that is named, here or by $HETERPS_CONTEXT; None where none is."""
    from heterps.home.target import Target

    return Target.named(*cluster())


def keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Remember what an option of `options.cluster` says; click calls it."""
    if value is not None:
        ctx.meta[f"{_META}{param.name}"] = value


def client() -> "Client":
    """A client of the cluster that the command's options name, else of the one that is found."""
    from heterps.client.client import Client

    return Client(*cluster())
