"""Threads of a process that must not end: each repeats a step, however that fails.

What a step raises is logged and counted, the next round waits longer, and whoever asks how the
process is hears of it, as of a step that does not end: a process whose work has stopped does not
serve.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from chassis.metrics import Family, Sample

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
Step = Callable[[], float | None]
_MOST_PAUSE_S = 5.0
HANGS_S = 60.0  # for which a round may go on; calls in them have shorter limits
_FAILURES = Family(
    "heterps_loop_failures_total",
    "counter",
    "Rounds of a thread's work that an unexpected error ended.",
    ("loop",),
)
_FAILING = Family(
    "heterps_loop_failing",
    "gauge",
    "1 while the latest round of a thread's work failed, or does not end.",
    ("loop",),
)
FAMILIES = (_FAILURES, _FAILING)
_log = logging.getLogger("heterps.loops")


class Loop:
    """A thread that repeats a step; see `Loops.start`.

    Attributes:
        failures: how many rounds an unexpected error has ended.
        failing: whether the latest one was among them, or does not end.
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
        self._began: float | None = None  # the round under way, by time.monotonic()
        self._lock = threading.Lock()  # held while it is told whether that fails
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

    def look(self, hangs_s: float) -> None:
        """Find out whether a round has been under way for so long; its end tells the rest."""
        with self._lock:
            began = self._began
            if began is not None and time.monotonic() - began > hangs_s and not self.failing:
                _log.error("%s: a round has not ended for %.0f s", self.name, hangs_s)
                self._tell(failing=True)

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
        self._began = time.monotonic()
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
            self._end_round(failing=True)
            return pause_s
        self._again = 0
        self._end_round(failing=False)
        return self._every_s if asked is None else asked

    def _end_round(self, *, failing: bool) -> None:
        with self._lock:
            self._began = None
            self._tell(failing=failing)

    def _tell(self, *, failing: bool) -> None:
        if failing != self.failing:
            self.failing = failing
            self._changed()


class Loops:
    """The loops of a process.

    Args:
        changed: called, on a thread of ours, when one begins to fail or has recovered.
        hangs_s: how long a round may take.
    """

    def __init__(
        self, changed: Callable[[], None] = lambda: None, hangs_s: float = HANGS_S
    ) -> None:
        self.changed = changed
        self._hangs_s = hangs_s
        self._loops: list[Loop] = []
        self._closed = threading.Event()

    def start(self, name: str, step: Step, every_s: float, expected: Errors = ()) -> Loop:
        """Repeat a step on a thread of its own until `close`.

        Args:
            step: gives the seconds until the next one where that is not `every_s`.
            every_s: between one step and the next.
            expected: errors that tell nothing about this process, such as a server that is away:
                logged, and tried again after a second.
        """
        loop = Loop(name, step, every_s, expected, self._tell)
        if not self._loops:
            threading.Thread(target=self._watch, name="loops", daemon=True).start()
        self._loops.append(loop)
        loop.start()
        return loop

    def _tell(self) -> None:
        self.changed()

    def _watch(self) -> None:
        while not self._closed.wait(self._hangs_s / 10):
            for loop in list(self._loops):
                loop.look(self._hangs_s)

    @property
    def failing(self) -> list[str]:
        """Names of the loops whose latest round failed, or does not end."""
        return [loop.name for loop in self._loops if loop.failing]

    def samples(self) -> Iterator[Sample]:
        """Their metrics, of `FAMILIES`."""
        for loop in self._loops:
            yield _FAILURES, (loop.name,), loop.failures
            yield _FAILING, (loop.name,), float(loop.failing)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all, the last first; safe to repeat."""
        self._closed.set()
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
