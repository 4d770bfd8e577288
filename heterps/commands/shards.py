"""Shards that run, as commands name and reach them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from heterps.commands import named, options
from heterps.errors import HeterpsError, UnreachableError

if TYPE_CHECKING:
    from ps import ParameterClient

F = TypeVar("F", bound=Callable[..., Any])
ANSWER_S = 5.0


def shards_option(command: F) -> F:
    """--shards, and the cluster whose standing ones are the default."""
    named = click.option(
        "--shards",
        metavar="HOST:PORT,...",
        help="All shards, in shard order.  [default: the standing ones of the running cluster]",
    )
    return named(options.cluster(command))


@contextmanager
def connected(shards: str | None, timeout_s: float = ANSWER_S) -> "Iterator[ParameterClient]":
    """A client of all shards whose failures are the command's."""
    from ps import ParameterClient

    addresses = addresses_of(shards)
    with explained(), ParameterClient(addresses, timeout_s=timeout_s) as client:
        yield client


@contextmanager
def explained() -> Iterator[None]:
    """Turn what tables, saves and shards complain of into the command's own errors."""
    import grpc

    from ps import CheckpointError, ShardError, TableError

    try:
        yield
    except (CheckpointError, TableError) as error:
        raise HeterpsError(str(error)) from None
    except ShardError as error:
        away = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        raise (UnreachableError if away else HeterpsError)(str(error)) from None


def addresses_of(shards: str | None, option: str = "--shards") -> list[str]:
    """The shards that are named, else the cluster's standing ones in the order that jobs use.

    To the command's end the process has the credentials of the cluster that was named or asked.
    """
    if shards is not None:
        given = [one.strip() for one in shards.split(",") if one.strip()]
        for one in given or [shards]:
            host, _, port = one.rpartition(":")
            if not host or not port.isdecimal():
                raise click.BadParameter(f"{one!r}: expected HOST:PORT,...", param_hint=option)
        if (target := named.target()) is not None:
            click.get_current_context().with_resource(target.exported())
        return given
    with named.client() as client:
        click.get_current_context().with_resource(client.target.exported())
        standing = [node.address for node in client.nodes() if node.kind == "shard"]
        if not standing:
            raise HeterpsError(
                f"the cluster at {client.address} has no standing shards; name those to look "
                "into with --shards HOST:PORT,... (`heterps ps --scheduler` starts standing ones)"
            )
    return standing
