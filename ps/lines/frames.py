"""Messages behind their lengths on a connection of TCP, in TLS or in the clear.

In the clear a message is a system call or two: the kernel waits until all of it has moved, or for
as long as it is told to. TLS moves 16 KB at a time.
"""

import json
import socket
import struct
import sys
import time

import numpy as np

from chassis.sealed import Sealed
from protos.codec import Buffer

_HEAD = struct.Struct("!BQ")  # method or status, bytes that follow
_TIME = struct.Struct("@ll")
_PIECE = 1 << 20  # bytes of TLS between two looks at the clock
_TOGETHER = 1 << 14  # bytes that TLS sends with their head
_LINE = 64  # bytes
_LEAST_S = 0.001
# What a reply may be that is none of ours.
MALFORMED = (json.JSONDecodeError, UnicodeDecodeError, ValueError, TypeError, AttributeError)


def send(connection: socket.socket, kind: int, body: bytes, until: float) -> None:
    """Send a message.

    Args:
        kind: its method, or status.
        until: when it has to be on its way, by the monotonic clock.

    Raises:
        OSError: the other is gone; TimeoutError: it takes nothing, or too slowly.
    """
    head = _HEAD.pack(kind, len(body))
    if _in_the_clear(connection):
        _allow(connection, socket.SO_SNDTIMEO, _left(until))
        _pushed(connection, [head, body] if body else [head], until)
        return
    connection.settimeout(_left(until))
    if len(body) <= _TOGETHER:
        connection.sendall(head + body)
        return
    connection.sendall(head)
    view = memoryview(body)
    for at in range(0, len(view), _PIECE):
        connection.settimeout(_left(until))
        connection.sendall(view[at : at + _PIECE])


def receive_head(
    connection: socket.socket, until: float | None, rest_s: float
) -> tuple[int, int] | None:
    """Method or status of the next message, and how many bytes follow; None: the other has ended.

    Args:
        until: when it has to come, by the monotonic clock; None: whenever.
        rest_s: for what is left of it, once it has begun.

    Raises:
        OSError: the other is gone; TimeoutError: it sends nothing.
    """
    if until is not None:
        connection.settimeout(_left(until))
    elif _in_the_clear(connection):
        _allow(connection, socket.SO_RCVTIMEO, 0.0)
    else:
        connection.settimeout(None)
    head = connection.recv(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        head += receive(connection, _HEAD.size - len(head), time.monotonic() + rest_s)
    method, size = _HEAD.unpack(head)
    return method, size


def receive(connection: socket.socket, size: int, until: float) -> bytes:
    """The next bytes of a connection.

    Raises:
        OSError: the other is gone; TimeoutError: it sends nothing, or too slowly.
        MemoryError: there is no room for them.
    """
    if _in_the_clear(connection):
        return _pulled(connection, size, until)
    return bytes(receive_rows(connection, size, until))


def receive_rows(connection: socket.socket, size: int, until: float) -> memoryview:
    """The next bytes of a connection, in memory that ends where a cache line does.

    It is the receiver's alone, and may be written to: rows at its end can stay where they are.

    Raises:
        OSError: the other is gone; TimeoutError: it sends nothing, or too slowly.
        MemoryError: there is no room for them.
    """
    room = np.empty(size + _LINE, np.uint8)
    begin = -(room.ctypes.data + size) % _LINE
    view = room[begin : begin + size].data
    if _in_the_clear(connection):
        _fill(connection, view, until)
    else:
        _unseal(connection, view, until)
    return view


def _unseal(connection: socket.socket, room: memoryview, until: float) -> None:
    at = looked = 0
    connection.settimeout(_left(until))
    while at < len(room):
        if at - looked >= _PIECE:
            connection.settimeout(_left(until))
            looked = at
        elif time.monotonic() > until:
            raise TimeoutError("too slow")
        more = connection.recv_into(room[at:])
        if not more:
            raise ConnectionError("the connection was closed")
        at += more


def _fill(connection: socket.socket, room: memoryview, until: float) -> None:
    while room:
        _allow(connection, socket.SO_RCVTIMEO, _left(until))
        try:
            come = connection.recv_into(room, len(room), socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing comes") from None
        if not come:
            raise ConnectionError("the connection was closed")
        room = room[come:]


def _pushed(connection: socket.socket, parts: list[Buffer], until: float) -> None:
    while True:
        try:
            sent = connection.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError("nothing is taken") from None
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if not parts:
            return
        parts[0] = memoryview(parts[0])[sent:]
        _allow(connection, socket.SO_SNDTIMEO, _left(until))


def _pulled(connection: socket.socket, size: int, until: float) -> bytes:
    parts: list[bytes] = []
    while size:
        _allow(connection, socket.SO_RCVTIMEO, _left(until))
        try:
            part = connection.recv(size, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing comes") from None
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _in_the_clear(connection: socket.socket) -> bool:
    return sys.platform == "linux" and not isinstance(connection, Sealed)


def _allow(connection: socket.socket, way: int, limit_s: float) -> None:
    """Have the kernel wait for so long; 0: for ever."""
    connection.settimeout(None)
    seconds, rest = divmod(limit_s, 1)
    connection.setsockopt(socket.SOL_SOCKET, way, _TIME.pack(int(seconds), int(rest * 1e6)))


def _left(until: float) -> float:
    """Seconds.

    Raises:
        TimeoutError: none.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return max(_LEAST_S, left)
