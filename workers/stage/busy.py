"""How long a device computes: a worker's own work, without its waiting for others."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class BusyClock:
    """Adds up the time between the beginning and the end of each piece of work.

    A GPU is told its work ahead, so there events in its stream are read once they have come. On a
    CPU a worker's one core does all there is to do, so what it packs, sends and keeps counts, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._inside = False
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is computed inside; what raises is not counted."""
        if self._device.type != "cuda":
            if self._inside:
                yield
                return
            begin, self._inside = time.perf_counter(), True
            yield
            self._seconds, self._inside = self._seconds + time.perf_counter() - begin, False
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        first.record(stream)
        yield
        last.record(stream)
        self._pending.append((first, last))

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Count all that the worker does inside, where its own core is what computes."""
        if self._device.type == "cuda":
            yield
            return
        with self.running():
            yield

    def seconds(self) -> float:
        """The sum, of what has ended so far."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        return self._seconds
