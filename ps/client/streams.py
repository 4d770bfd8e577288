"""A client's streams to one shard: as many as it makes calls at once."""

import logging
import random
import threading
import time
from collections.abc import Callable

from protos.codec import Buffer
from ps.errors import ShardError
from ps.lines.calls import BrokenLineError, RefusedError
from ps.lines.stream import StreamLine

_log = logging.getLogger("heterps.ps")
_chance = random.Random()  # our own: in a worker, who draws from Python's is a model
_MOST = 8  # at once; further calls go by gRPC
_PAUSE_S = 60.0  # before they are tried again where a call stalled, or they never work
_AWAY_S = 1.0  # where the shard itself did not answer, or the first time that there is none


class Streams:
    """Lines that are made when needed and kept.

    Args:
        make: introduces this client to the shard and connects. It raises OSError or ShardError
            where that is not to be had.
    """

    def __init__(self, make: Callable[[], StreamLine]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._lines: set[StreamLine] = set()
        self._free: list[StreamLine] = []
        self._making = 0
        self._not_before = 0.0
        self._pause_s = _AWAY_S  # doubles: many clients of a shard that is back come all at once

    @property
    def open(self) -> bool:
        """Whether there are any now."""
        return bool(self._lines)

    def call(self, method: int, request: bytes, timeout: float) -> Buffer:
        """The reply's bytes.

        Raises:
            RefusedError: the shard refused.
            BrokenLineError: there is no stream to it, or it broke or stalled; the message may have
                come there.
        """
        line = self._take()
        if line is None:
            raise BrokenLineError("no stream")
        keep = False
        began = time.monotonic()
        try:
            reply = line.call(method, request, timeout)
            keep = True
            return reply
        except RefusedError:
            keep = True
            raise
        except BrokenLineError:
            # The others are of the same shard: it was restarted, or the way to it is closed.
            self._drop(pause=time.monotonic() - began >= timeout)
            raise
        finally:
            with self._lock:
                if keep and line in self._lines:
                    self._free.append(line)
                else:
                    self._lines.discard(line)
                    line.close()

    def close(self) -> None:
        """Disconnect; calls under way find that the shard is gone, and no more are made."""
        with self._lock:
            self._not_before = float("inf")
            for line in self._lines:
                line.hang_up()
            for line in self._free:
                line.close()
            self._lines.clear()
            self._free.clear()

    def _take(self) -> StreamLine | None:
        with self._lock:
            if self._free:
                return self._free.pop()
            full = len(self._lines) + self._making >= _MOST
            if full or time.monotonic() < self._not_before:
                return None
            self._making += 1
        made: StreamLine | None = None
        pause_s = self._pause_s * _chance.uniform(0.5, 1.5)
        try:
            made = self._make()
            self._pause_s = _AWAY_S
        except OSError as error:
            _log.debug("no stream: %s", error)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S)
        except ShardError as error:  # the message itself will say what is wrong
            _log.debug("no stream: %s", error)
            pause_s = _AWAY_S
        finally:
            with self._lock:
                self._making -= 1
                closed = self._not_before == float("inf")
                if made is None:
                    self._not_before = max(self._not_before, time.monotonic() + pause_s)
                elif not closed:
                    self._lines.add(made)
        if made is not None and closed:
            made.close()
            return None
        return made

    def _drop(self, *, pause: bool) -> None:
        with self._lock:
            for line in self._free:
                self._lines.discard(line)
                line.close()
            self._free.clear()
            if pause:
                self._not_before = max(self._not_before, time.monotonic() + _PAUSE_S)
