"""Futures of several shards as one."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def results_of(futures: Sequence["Future[T]"]) -> list[T]:
    """Wait for all; their results, or the first error in the order given."""
    errors = [error for error in [f.exception() for f in futures] if error is not None]
    if errors:
        raise errors[0]
    return [f.result() for f in futures]


def combine(
    futures: Sequence["Future[Any]"],
    finish: Callable[[list[Any]], T],
    or_else: Callable[[BaseException], T] | None = None,
) -> "Future[T]":
    """A future of finish(results) once all are done; finish runs on the last one's thread.

    Args:
        futures: what to wait for.
        finish: makes the result of theirs.
        or_else: makes it of the first error, or raises.
    """
    combined: Future[T] = Future()
    combined.set_running_or_notify_cancel()
    left = itertools.count(len(futures) - 1, -1)
    lock = threading.Lock()

    def complete() -> None:
        try:
            try:
                results = results_of(futures)
            except Exception as error:
                if or_else is None:
                    raise
                combined.set_result(or_else(error))
                return
            combined.set_result(finish(results))
        except Exception as error:
            combined.set_exception(error)

    def done(_: "Future[Any]") -> None:
        with lock:
            last = next(left) == 0
        if last:
            complete()

    if not futures:
        complete()
    for future in futures:
        future.add_done_callback(done)
    return combined


class InOrder:
    """Starts what has one name one after the other, each once the one before has succeeded."""

    def __init__(self) -> None:
        self._last: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def start(
        self, name: str, begin: "Callable[[], Future[None]]", abandon: Callable[[], None]
    ) -> "Future[None]":
        """Start now, or after what was started last under this name.

        Where that fails, this one fails with the same error.

        Args:
            name: see above.
            begin: starts it.
            abandon: called in its place where the one before has failed.
        """
        made: Future[None] = Future()
        made.set_running_or_notify_cancel()
        with self._lock:
            before = self._last.get(name)
            self._last[name] = made

        def end(error: BaseException | None) -> None:
            with self._lock:
                if self._last.get(name) is made:
                    del self._last[name]
            if error is not None:
                made.set_exception(error)
            else:
                made.set_result(None)

        def go(error: BaseException | None) -> None:
            try:
                if error is not None:
                    abandon()
                    raise error
                begun = begin()
            except Exception as raised:
                end(raised)
            else:
                begun.add_done_callback(lambda done: end(done.exception()))

        if before is None:
            go(None)
        else:
            before.add_done_callback(lambda done: go(done.exception()))
        return made
