"""The end of a connection, in TLS or in the clear."""

import contextlib
import socket


def hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Have whoever reads from a connection, or writes to it, find its end; safe to repeat."""
    # Not its own method: after that of TLS what is sent meanwhile would go in the clear.
    with contextlib.suppress(OSError):  # it is down already
        socket.socket.shutdown(connection, how)
