"""Calls between client and shard that do not go by gRPC, over whatever connection they come.

A request is a method's number and the bytes that gRPC would carry, a reply a status and such bytes,
or, where the status is not zero, what is told of it. One call at a time takes a connection; a
client sends nothing while it waits, and hangs up when it gives up.
"""

import json
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from chassis.hang_up import hang_up
from chassis.refusal import Metadata, Refusing

PULL, PUSH, STAGE, TALLY, COMMIT = range(5)  # the methods
OK = 0
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger("heterps.ps")

Handler = Callable[[bytes, Refusing], bytes]


class RefusedError(grpc.RpcError):
    """A call that ended with a status, in the form of gRPC's errors."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        super().__init__(details)
        self._code = code
        self._details = details
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """What it says."""
        return self._details

    def trailing_metadata(self) -> Any:
        """What came beside the status, as pairs of key and value."""
        return self._metadata


class BrokenLineError(RuntimeError):
    """The connection is of no use any more; whether the shard has seen the message is not known."""


class Line:
    """The client's side of a connection; those that make one have the calls."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def hang_up(self) -> None:
        """Have the call under way, and all later ones, find that the shard is gone."""
        hang_up(self._socket)

    def close(self) -> None:
        """Disconnect; safe to repeat."""
        self._socket.close()


def answered(
    handlers: Sequence[Handler], method: int, request: bytes, connection: socket.socket
) -> tuple[int, bytes]:
    """What a handler makes of a request: zero and its bytes, or another status and what it says.

    Args:
        handlers: of the methods, in their order. They raise what `abort` of their context raises.
    """
    try:
        if method >= len(handlers):
            raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        return OK, handlers[method](request, _Context(connection))
    except RefusedError as error:
        return refused(error)
    except Exception as error:  # a handler ends in a reply or an abort; this one did not
        _log.exception("a call failed")
        return refused(RefusedError(grpc.StatusCode.INTERNAL, repr(error)[:2000]))


def refused(error: RefusedError) -> tuple[int, bytes]:
    """A refusal as status and bytes."""
    told = json.dumps([error.details(), dict(error.trailing_metadata())])
    return error.code().value[0], told.encode()


def refusal(status: int, told: bytes) -> RefusedError:
    """The refusal that came as status and bytes."""
    details, metadata = json.loads(told)
    code = _STATUS.get(status, grpc.StatusCode.UNKNOWN)
    return RefusedError(code, details, tuple(metadata.items()))


class _Context:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._metadata: Metadata = ()

    def is_active(self) -> bool:
        try:  # not its own method: that of TLS would read
            return bool(
                socket.socket.recv(self._connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            )
        except BlockingIOError:
            return True
        except OSError:
            return False

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        self._metadata = trailing_metadata

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedError(code, details, self._metadata)
