"""Bounded staleness: workers tell their clocks, and wait for the slowest (SSP, Ho et al. 2013)."""

import math
import threading
import time
from dataclasses import dataclass, field

from protos import parameter_server_pb2 as pb
from ps.errors import TableError

_LONGEST_WAIT_S = 10.0
_MOST_GROUPS = 1024
_LEFT = 1 << 63


@dataclass(slots=True)
class _Group:
    clocks: list[int]
    heard: list[float]  # when each worker last called, time.monotonic()
    calling: list[int]  # calls of each worker under way
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def of(cls, workers: int) -> "_Group":
        return cls([0] * workers, [time.monotonic()] * workers, [0] * workers)

    def slowest(self, expire_s: float) -> tuple[int, int]:
        """The lowest clock of those that count, and whose it is."""
        oldest = time.monotonic() - expire_s
        return min(
            (clock, worker)
            for worker, clock in enumerate(self.clocks)
            if not expire_s or self.calling[worker] or self.heard[worker] >= oldest
        )


class Clocks:
    """Groups of workers by name. A clock counts steps whose pushes are acknowledged.

    Args:
        waiting: how many calls may wait here; further ones are told at once that they are not
            ready, so that waiters never take all the threads that pushes need.
    """

    def __init__(self, waiting: int = 8) -> None:
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        self._places = threading.Semaphore(waiting)

    def advance(self, request: pb.AdvanceRequest) -> pb.AdvanceReply:
        """Note a worker's clock and wait a while for the slowest; asked again until ready.

        Raises:
            TableError: numbers that make no sense.
        """
        if not (1 <= request.workers <= 65536 and request.worker < request.workers):
            raise TableError(
                f"Advance: worker {request.worker} of {request.workers}; expected 0 <= worker < "
                "workers <= 65536"
            )
        if not (math.isfinite(request.expire_s) and request.expire_s >= 0):
            raise TableError(f"Advance: expire_s={request.expire_s}; expected seconds, 0 for never")
        group = self._group(request)
        worker = request.worker
        limit = time.monotonic()
        placed = self._places.acquire(blocking=False)
        if placed:
            limit += min(max(request.wait_s, 0.0), _LONGEST_WAIT_S)
        with group.changed:
            group.calling[worker] += 1
            try:
                clock = _LEFT if request.leave else request.clock
                if clock > group.clocks[worker]:
                    group.clocks[worker] = clock
                    group.changed.notify_all()
                while True:
                    slowest, who = group.slowest(request.expire_s)
                    ready = request.leave or slowest + request.staleness >= request.clock
                    left = limit - time.monotonic()
                    if ready or left <= 0:
                        return pb.AdvanceReply(ready=ready, slowest=slowest, slowest_worker=who)
                    group.changed.wait(left)
            finally:
                group.calling[worker] -= 1
                group.heard[worker] = time.monotonic()
                if placed:
                    self._places.release()

    def _group(self, request: pb.AdvanceRequest) -> _Group:
        name, workers = request.group, request.workers
        with self._lock:
            group = self._groups.get(name)
            # A job of that name that runs again begins anew once all before it have left; a
            # goodbye that is said twice is not its beginning.
            if group is None or (min(group.clocks) >= _LEFT and not request.leave):
                group = self._groups[name] = _Group.of(workers)
                if len(self._groups) > _MOST_GROUPS:
                    oldest = min(self._groups, key=lambda n: max(self._groups[n].heard))
                    if oldest != name:
                        del self._groups[oldest]
            if len(group.clocks) != workers:
                raise TableError(
                    f"Advance: group {name[:80]!r} has {len(group.clocks)} workers; the request "
                    f"says {workers}"
                )
            return group
