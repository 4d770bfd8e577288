"""Futures of several shards as one."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


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


def then(first: "Future[T]", begin: "Callable[[T], Future[U]]") -> "Future[U]":
    """A future of what `begin` starts with the first one's result."""
    made: Future[U] = Future()
    made.set_running_or_notify_cancel()

    def go(done: "Future[T]") -> None:
        try:
            begun = begin(done.result())
        except Exception as error:
            made.set_exception(error)
        else:
            begun.add_done_callback(lambda ended: _copy(ended, made))

    first.add_done_callback(go)
    return made


class InOrder:
    """Starts what has one name one after the other, each once the one before has succeeded."""

    def __init__(self) -> None:
        self._last: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def start(self, name: str, begin: "Callable[[], Future[None]]") -> "Future[None]":
        """Start now, or after what was started last under this name and has not ended.

        Where that fails, this one fails with the same error, and nothing is begun.
        """
        turn: Future[None] = Future()
        made = then(turn, lambda _: begin())
        with self._lock:
            before = self._last.get(name)
            if before is not None and before.done():
                before = None  # whoever waited for it may be here before it is forgotten
            self._last[name] = made

        def forget(_: "Future[None]") -> None:
            with self._lock:
                if self._last.get(name) is made:
                    del self._last[name]

        made.add_done_callback(forget)
        if before is None:
            turn.set_result(None)
        else:
            before.add_done_callback(lambda done: _copy(done, turn))
        return made


def _copy(done: "Future[T]", to: "Future[T]") -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
