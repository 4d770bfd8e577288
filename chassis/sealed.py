"""TLS for bulk bytes: some hundred KB move with each system call.

A socket of `ssl` reads the head and the body of each record of 16 KB by a system call of its own.
"""

import contextlib
import socket
import ssl
from typing import Any

_PIECE = 1 << 18


class Sealed(socket.socket):
    """A connection in TLS, for one thread at a time.

    Of a socket's methods those that send and receive are of TLS: `recv`, `recv_into`, `sendall`.

    Args:
        plain: is taken over, and is of no use then.
        host: that the other's certificate has to name; empty at the server.

    Raises:
        OSError: the handshake has failed, or took longer than the socket's timeout.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str = "") -> None:
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._unsent = memoryview(b"")  # sealed, and not taken by the kernel
        self._room = memoryview(bytearray(_PIECE))
        try:
            self.settimeout(timeout)
            self._tls = context.wrap_bio(
                *(self._came, self._goes), server_side=not host, server_hostname=host or None
            )
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def version(self) -> str | None:
        """Of TLS."""
        return self._tls.version()

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive at least a byte, or 0 at the end."""
        view = memoryview(buffer)[: nbytes or None]
        while len(view):
            try:
                count: Any = self._tls.read(len(view), view)  # with a buffer a number
                return int(count)
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
        return 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive at most so many bytes; none at the end."""
        room = bytearray(size)
        return bytes(room[: self.recv_into(room)])

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all of it."""
        view, at = memoryview(data), 0
        while at < len(view):
            end = min(len(view), at + _PIECE)
            while at < end:
                at += self._tls.write(view[at:end])
            self._flush()

    def begin(self, data: Any) -> None:
        """Seal what `go_on` is to send, after what it has begun."""
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._tls.write(view[at : at + _PIECE])

    def go_on(self) -> bool:
        """Send what the kernel takes without waiting; whether all has gone."""
        if self._goes.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._goes.read())
        before = self.gettimeout()
        self.settimeout(0.0)
        try:
            while self._unsent:
                self._unsent = self._unsent[super().send(self._unsent) :]
        except BlockingIOError:
            return False
        finally:
            self.settimeout(before)
        return True

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # what is wrong
                raise
        self._flush()

    def _flush(self) -> None:
        if self._unsent:  # who reads meanwhile must not wait for the other to read
            self.go_on()
        elif self._goes.pending:
            super().sendall(self._goes.read())

    def _fill(self) -> None:
        count = super().recv_into(self._room)
        if count:
            self._came.write(self._room[:count])
        else:
            self._came.write_eof()
