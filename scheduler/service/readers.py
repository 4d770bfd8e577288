"""Those who follow a job over a stream: so many at a time, each for as long as it stays."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from chassis.callers import Callers

_MOST = 128  # each holds a thread for as long as it stays


class Readers:
    """Gives each reader a place.

    Args:
        stop: set when the scheduler ends: then all have to go.
        callers: who they are: one whose token is revoked has to go as well.
    """

    def __init__(self, stop: threading.Event, callers: Callers) -> None:
        self._stop = stop
        self._callers = callers
        self._places = threading.BoundedSemaphore(_MOST)

    @contextmanager
    def enter(self, context: grpc.ServicerContext) -> Iterator[Callable[[], bool]]:
        """Hold a place, or refuse the call; yields the test of whether the reader has gone."""
        if not self._places.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MOST} readers follow jobs already; try again later",
            )
        try:
            yield (
                lambda: (
                    self._stop.is_set()
                    or not context.is_active()
                    or not self._callers.still(context)
                )
            )
            self._callers.of(context)  # one whose token was revoked is told
        finally:
            self._places.release()

    def pause(self, seconds: float, gone: Callable[[], bool]) -> None:
        """Wait, less when the reader goes."""
        until = time.monotonic() + seconds
        while not gone() and time.monotonic() < until:
            self._stop.wait(0.1)
