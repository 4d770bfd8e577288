"""The end of a node that may take its time: jobs leave it first.

A node that is told to end (SIGTERM, or a notice of whoever rents it out) takes nothing new and says
so with its lease. It ends once nothing of a job runs on it, or when its time is over.
"""

import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chassis.loops import Loops

NOTICE_S = 30.0
_LOOK_S = 0.1
_ASK_S = 1.0
_TIMEOUT_S = 2.0
_NO = ("", "false", "none")  # what a place says that knows of no end
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is this machine's own
_log = logging.getLogger("heterps.node")


class Draining:
    """Whether a node is to end, and by when.

    Args:
        notice_s: seconds from the first word until it ends, whatever runs; 0: it ends at once.
        stop: set when it is to end.
    """

    def __init__(self, notice_s: float, stop: threading.Event) -> None:
        self._notice_s = notice_s
        self._stop = stop
        self._lock = threading.Lock()
        self._ends: float | None = None  # time.monotonic()
        self._runs: Callable[[], bool] = lambda: False
        self._changed: Callable[[], None] = lambda: None

    @property
    def ends_in_s(self) -> float | None:
        """Seconds until the node ends at the latest; None while it is to stay."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def serve(self, runs: Callable[[], bool], changed: Callable[[], None]) -> None:
        """The node serves from now on.

        Args:
            runs: whether anything of a job runs on it.
            changed: has the scheduler told.
        """
        self._runs, self._changed = runs, changed

    def begin(self) -> None:
        """Have the node end: the first time when it may, the second time at once."""
        if not self._notice_s or not self.ask(self._notice_s):
            self._stop.set()

    def ask(self, notice_s: float) -> bool:
        """Have the node end when it may, within so many seconds; False where it is to already."""
        with self._lock:
            if self._ends is not None:
                return False
            self._ends = time.monotonic() + notice_s
        threading.Thread(target=self._wait, name="draining", daemon=True).start()
        return True

    def watch(self, place: str, loops: Loops) -> None:
        """Begin when a place says that this machine goes away: see `is_given`."""

        def ask() -> None:
            if self._ends is None and is_given(place):
                _log.warning("%s: this machine goes away", place)
                self.begin()

        loops.start("notice", ask, _ASK_S)

    def _wait(self) -> None:
        _log.info("draining: it ends once no job runs here, in %.0f s at most", self.ends_in_s)
        self._changed()
        while self._runs():
            if not self.ends_in_s:
                _log.warning("the time is over, and jobs run here still")
                break
            if self._stop.wait(_LOOK_S):
                break
        self._stop.set()


def is_given(place: str) -> bool:
    """Whether a file is there, or a URL answers 200, and says anything but FALSE or NONE.

    One that cannot be reached says nothing.
    """
    try:
        if "://" not in place:
            return Path(place).read_text(errors="replace").strip().lower() not in _NO[1:]
        request = urllib.request.Request(place, headers={"Metadata-Flavor": "Google"})
        with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            said = answer.read(100).decode(errors="replace").strip().lower()
            return answer.status == 200 and said not in _NO
    except (OSError, ValueError):
        return False
