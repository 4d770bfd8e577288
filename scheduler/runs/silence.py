"""Workers that tell nothing any more, though they run: stopped, or on a host that stands still.

Who sums with such a worker meets a deadline. Who waits for it in another stage does not, as a
micro-batch may take however long; its reports come from a thread of their own, so long as it runs.
"""

import time
from collections.abc import Iterable

SILENT_S = 60.0  # reports come every two seconds and more often
_MOST_S = 1.0  # that pass between two looks: else it is this process that stood still

Worker = tuple[int, int]  # stage and rank


class Silence:
    """For how long each worker has told nothing, as far as this process would have heard it."""

    def __init__(self) -> None:
        self._silent_s: dict[Worker, float] = {}
        self._looked = time.monotonic()

    def hear(self, worker: Worker) -> None:
        """It has told something."""
        self._silent_s[worker] = 0.0

    def forget(self) -> None:
        """Others follow."""
        self._silent_s.clear()

    def look(self, done: Iterable[Worker]) -> list[Worker]:
        """Those that are silent for too long; called often.

        Args:
            done: that need tell nothing more.
        """
        now = time.monotonic()
        passed = min(now - self._looked, _MOST_S)
        self._looked = now
        for worker in self._silent_s:
            self._silent_s[worker] += passed
        over = {worker for worker, silent_s in self._silent_s.items() if silent_s > SILENT_S}
        return sorted(over.difference(done))
