"""Threads of a process that must not end: each repeats a step, however that fails.

What a step raises is logged and counted, the next round waits longer, and whoever asks how the
process is hears of it: a process whose work has stopped does not serve.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from chassis.metrics import Family, Sample

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
Step = Callable[[], float | None]
_MOST_PAUSE_S = 5.0
_FAILURES = Family(
    "heterps_loop_failures_total",
    "counter",
    "Rounds of a thread's work that an unexpected error ended.",
    ("loop",),
)
_FAILING = Family(
    "heterps_loop_failing",
    "gauge",
    "1 while the latest round of a thread's work failed.",
    ("loop",),
)
FAMILIES = (_FAILURES, _FAILING)
_log = logging.getLogger("heterps.loops")


class Loop:
    """A thread that repeats a step; see `Loops.start`.

    Attributes:
        failures: how many rounds an unexpected error has ended.
        failing: whether the latest one was among them.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        every_s: float,
        expected: Errors = (),
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.failures = 0
        self.failing = False
        self._step = step
        self._every_s = every_s
        self._expected = expected
        self._changed = changed
        self._again = 0  # failures on end
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first step comes after a pause."""
        self._thread.start()

    def kick(self) -> None:
        """Have the next step made now."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """End, after the step that is being made; safe to repeat."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = self._every_s
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            pause_s = self._round()

    def _round(self) -> float:
        """Make one step; seconds until the next."""
        try:
            asked = self._step()
        except self._expected as error:
            _log.warning("%s", error)
            asked = max(self._every_s, 1.0)
        except Exception:
            self.failures += 1
            self._again += 1
            pause_s = min(max(self._every_s, 0.1) * 2.0 ** min(self._again, 9), _MOST_PAUSE_S)
            _log.exception("%s: a round failed; the next one in %.1f s", self.name, pause_s)
            self._tell(failing=True)
            return pause_s
        self._again = 0
        self._tell(failing=False)
        return self._every_s if asked is None else asked

    def _tell(self, *, failing: bool) -> None:
        if failing != self.failing:
            self.failing = failing
            self._changed()


class Loops:
    """The loops of a process.

    Args:
        changed: called, on a loop's thread, when one begins to fail or has recovered.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        self._loops: list[Loop] = []

    def start(self, name: str, step: Step, every_s: float, expected: Errors = ()) -> Loop:
        """Repeat a step on a thread of its own until `close`.

        Args:
            step: gives the seconds until the next one where that is not `every_s`.
            every_s: between one step and the next.
            expected: errors that tell nothing about this process, such as a server that is away:
                logged, and tried again after a second.
        """
        loop = Loop(name, step, every_s, expected, self._tell)
        self._loops.append(loop)
        loop.start()
        return loop

    def _tell(self) -> None:
        self.changed()

    @property
    def failing(self) -> list[str]:
        """Names of the loops whose latest round failed."""
        return [loop.name for loop in self._loops if loop.failing]

    def samples(self) -> Iterator[Sample]:
        """Their metrics, of `FAMILIES`."""
        for loop in self._loops:
            yield _FAILURES, (loop.name,), loop.failures
            yield _FAILING, (loop.name,), float(loop.failing)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all, the last first; safe to repeat."""
        for loop in reversed(self._loops):
            loop.close(timeout_s)


def for_each(items: Iterable[T], action: Callable[[T], object], at_once: Errors = ()) -> None:
    """Do something for every item, whatever it raises for one of them.

    Args:
        at_once: errors that hold for all the others, too, and are raised at once.

    Raises:
        ExceptionGroup: at the end, of what `action` raised.
    """
    failed: list[Exception] = []
    for item in items:
        try:
            action(item)
        except at_once:
            raise
        except Exception as error:
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} failed", failed)
