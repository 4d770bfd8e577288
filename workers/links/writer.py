"""The way out of a connection: what the kernel takes at once its caller sends, a thread the rest.

A thread for all of it would cost each small message two more changes of threads, in a process whose
threads share one core.
"""

import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Rest:
    """What is left of a message, and what to do when it is sent."""

    parts: list[memoryview]
    sent: Callable[[], None] | None
    needed: bool


class Writer:
    """Sends messages in order, without waiting for the other side.

    Args:
        connection: blocking.
        name: of the thread.
        failed: told of an error that a needed message met, by the thread that met it; what follows
            any error is dropped.
        most: messages that may wait; `send` waits while there are as many. 0: any number.
        alive: sent whenever nothing was for `alive_s` seconds; empty: never.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        failed: Callable[[OSError], None],
        *,
        most: int = 0,
        alive: bytes = b"",
        alive_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._failed = failed
        self._most = most
        self._alive, self._alive_s = alive, alive_s
        self._direct = not isinstance(connection, ssl.SSLSocket)
        self._changed = threading.Condition()
        self._waiting: deque[_Rest] = deque()
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        if alive:
            self._start()

    def send(
        self,
        head: bytes,
        payload: memoryview | bytes = b"",
        sent: Callable[[], None] | None = None,
        *,
        needed: bool = True,
    ) -> None:
        """Send a message.

        Args:
            payload: left alone until `sent` is called, by this thread or another.
            needed: whether it matters that it cannot be sent.
        """
        parts = [part for part in (memoryview(head), memoryview(payload)) if part.nbytes]
        error: OSError | None = None
        with self._changed:
            while self._most and len(self._waiting) >= self._most and not self._over:
                self._changed.wait()
            if self._over or self._closing:
                return
            if self._direct and not self._waiting:
                try:
                    parts = _after(parts, self._connection.sendmsg(parts, [], socket.MSG_DONTWAIT))
                except BlockingIOError:
                    pass
                except OSError as caught:
                    error = caught
            if parts and error is None:
                self._waiting.append(_Rest(parts, sent, needed))
                self._start()
                self._changed.notify_all()
                return
        if error is not None:
            self._fail(error, needed)
        elif sent is not None:
            sent()

    def flush(self) -> None:
        """Wait until the kernel has all that was sent, or there is an error."""
        with self._changed:
            while self._waiting and not self._over:
                self._changed.wait()

    def close(self, patience_s: float | None = None, last: bytes = b"") -> None:
        """Send nothing more than what is waiting, for which `patience_s` is waited; None: drop it.

        The connection stays open.

        Args:
            last: sent after all that, as far as there is patience.
        """
        if last and not self._waiting:  # else this might wait for room
            self.send(last, needed=False)
            last = b""
        with self._changed:
            if last and patience_s is not None and not self._over:
                self._waiting.append(_Rest([memoryview(last)], None, False))
            self._closing = True
            self._over |= patience_s is None
            self._changed.notify_all()
        if patience_s is not None and self._started:
            self._thread.join(patience_s)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def _fail(self, error: OSError, needed: bool) -> None:
        with self._changed:
            first, self._over = not self._over, True
            self._changed.notify_all()
        if first and needed:
            self._failed(error)

    def _next(self) -> _Rest | None:
        with self._changed:
            while not self._waiting:
                if self._over or self._closing:
                    return None
                if not self._changed.wait(self._alive_s) and self._alive and not self._waiting:
                    self._waiting.append(_Rest([memoryview(self._alive)], None, False))
            return None if self._over else self._waiting[0]

    def _run(self) -> None:
        while (rest := self._next()) is not None:
            try:
                for part in rest.parts:
                    self._connection.sendall(part)
            except OSError as error:
                self._fail(error, rest.needed)
                return
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
            if rest.sent is not None:
                rest.sent()


def _after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left once the first `sent` bytes are gone."""
    left = []
    for part in parts:
        if sent < part.nbytes:
            left.append(part[sent:])
        sent = max(0, sent - part.nbytes)
    return left
