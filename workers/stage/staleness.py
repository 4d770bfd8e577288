"""How far the rows of a step may lag behind."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.links.inbox import Stopped


@dataclass(slots=True)
class StalenessBound:
    """Which steps' rows have been pulled and which steps' gradients have landed."""

    staleness: int
    stop: threading.Event
    ordered: bool
    _pulled: int = -1
    _acked: int = -1
    _last: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def before_pull(self, step: int) -> None:
        """Wait until rows of `step` may be pulled."""
        self._wait(lambda: self._acked >= step - 1 - self.staleness)

    def pulled(self, step: int) -> None:
        """Rows of `step` are here."""
        with self._changed:
            self._pulled = max(self._pulled, step)
            self._changed.notify_all()

    def no_more_pulls(self) -> None:
        """The last step's rows have been pulled."""
        with self._changed:
            self._last = True
            self._changed.notify_all()

    def before_push(self, step: int) -> None:
        """Wait until gradients of `step` may be pushed."""
        if self.ordered:
            self._wait(lambda: self._last or self._pulled >= step + self.staleness)

    def acked(self, step: int) -> None:
        """Gradients of `step` have been applied by every shard."""
        with self._changed:
            self._acked = max(self._acked, step)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            while not condition():
                if self.stop.is_set():
                    raise Stopped("stopped")
                self._changed.wait(0.2)
