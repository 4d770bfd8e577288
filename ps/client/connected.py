"""A client's connections: to every shard, anew in a forked child, until it is closed."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from chassis.closing import Closing
from ps.client.session import Session, Shard
from ps.engine import _native


class Connected(Closing):
    """Calls to all shards, by connections that are made on the first one.

    Thread-safe. A forked child connects anew on its first call, under a name of its own.

    Args:
        addresses, timeout_s, client_id, channels, shared_memory, streams: as of `ParameterClient`.

    Raises:
        ValueError: naming the argument, its value and what was expected.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        client_id: str | None,
        *,
        channels: int,
        shared_memory: bool,
        streams: bool,
    ) -> None:
        if isinstance(addresses, str) or not 1 <= len(addresses) <= _native.BUCKETS:
            raise ValueError(
                f"addresses={addresses!r}; expected a list of 1 to {_native.BUCKETS} host:port"
            )
        for address in addresses:
            if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
                raise ValueError(f"addresses: {address!r}; expected host:port")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}; expected a positive number of seconds")
        if client_id is not None and not 1 <= len(client_id) <= 200:
            raise ValueError(f"client_id: {len(client_id)} characters; expected 1 to 200")
        if not 1 <= channels <= 64:
            raise ValueError(f"channels={channels}; expected 1 to 64")
        self._addresses = list(addresses)
        self._timeout_s = float(timeout_s)
        self._client_id = client_id
        self._connect = partial(
            Session, channels=channels, shared_memory=shared_memory, streams=streams
        )
        self._lock = threading.Lock()
        self._current: Session | None = None
        self._closed = False
        self._closing: Session | None = None  # calls under way are waited for

    @property
    def addresses(self) -> list[str]:
        """host:port of every shard."""
        session = self._current
        return list(session.routes.addresses if session else self._addresses)

    def abort(self) -> None:
        """Have every call fail, those under way at once, with a ShardError; to be closed still.

        Whether shards have done, or will do, what was under way is not known.
        """
        with self._lock:
            sessions, self._closed = {self._current, self._closing}, True
        for session in sessions:
            if session is not None and session.pid == os.getpid():
                session.abort()

    def close(self) -> None:
        """Wait for calls under way and disconnect; safe to repeat."""
        with self._lock:
            session, self._current, self._closed = self._current, None, True
            self._closing = session or self._closing
        if session is not None and session.pid == os.getpid():
            session.close()
            self._closing = None

    def session(self) -> Session:
        """The connections of this process."""
        session = self._current
        if session is not None and session.pid == os.getpid():
            return session
        with self._lock:
            if self._closed:
                raise RuntimeError("this ParameterClient is closed")
            session = self._current
            if session is None or session.pid != os.getpid():
                session = self._connect(self._addresses, self._timeout_s, self._client_id)
                self._current = session
            return session

    def on_all(self, one: Callable[[Shard], Any]) -> list[Any]:
        """Call every shard side by side; the replies in shard order."""
        session = self.session()
        session.update_routes()
        return session.run([partial(one, shard) for shard in session.shards])

    def on_all_of_one_routing(self, one: Callable[[Shard], Any]) -> list[Any]:
        """Call every shard, those too that buckets have moved to meanwhile."""
        session = self.session()
        replies: list[Any] = []
        while True:
            version = session.routes.version
            replies += self.on_all(one)
            session.update_routes()
            if session.routes.version == version:
                return replies
