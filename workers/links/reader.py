"""The way in of a connection: messages in order, and whether the other side still lives.

Small messages that came together are taken together, with one call of the kernel's.
"""

import select
import socket
import ssl
import struct

_AHEAD = 4096  # bytes taken at once, where fewer are asked for
_SECOND = struct.pack("@ll", 1, 0)  # and no microseconds, of setsockopt


class Reader:
    """Reads what the other side sends.

    Args:
        connection: of which nobody else reads.
        silence_s: seconds without a byte after which the other side counts as gone. They are
            counted one by one, so that a pause of this worker's own host is none of others.
    """

    def __init__(self, connection: socket.socket, silence_s: int) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._poll: select.poll | None = None
        if isinstance(connection, ssl.SSLSocket):  # what it has decrypted the kernel knows not of
            connection.setblocking(False)
            self._poll = select.poll()
            self._poll.register(connection, select.POLLIN)
        else:
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SECOND)
        self._buffer = memoryview(bytearray(_AHEAD))
        self._here = self._buffer[:0]  # bytes of it that nobody has asked for yet

    def fill(self, view: memoryview) -> None:
        """Receive until `view` is full.

        Raises:
            OSError: the connection is closed or broken, or nothing came for too long.
        """
        while view:
            if not self._here and len(view) >= _AHEAD:
                view = view[self._receive(view) :]
                continue
            if not self._here:
                self._here = self._buffer[: self._receive(self._buffer)]
            count = min(len(view), len(self._here))
            view[:count] = self._here[:count]
            view, self._here = view[count:], self._here[count:]

    def _receive(self, view: memoryview) -> int:
        """Receive what there is, at least a byte."""
        silent = 0
        while True:
            try:
                count = self._connection.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):  # of the first after a second
                if self._poll is not None and self._poll.poll(1000):
                    continue
                silent += 1
                if silent >= self._silence_s:
                    raise TimeoutError(f"no sign of life for {silent} s") from None
                continue
            if not count:
                raise ConnectionError("closed the connection")
            return count
