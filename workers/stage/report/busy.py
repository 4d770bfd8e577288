"""How long a device computes: a worker's own work, without its waiting for others."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch

_COUNTED = nullcontext()  # by what is around it, or not at all


class BusyClock(AbstractContextManager[None]):
    """Adds up the time between the beginning and the end of each piece of work.

    A GPU is told its work ahead, so there events in its stream are read once they have come. On a
    CPU a worker's one core does all there is to do, so what it packs, sends and keeps counts, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._begun = 0.0
        self._inside = False
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def running(self) -> AbstractContextManager[object]:
        """Count what is computed inside; what raises is not counted."""
        if self._device.type == "cuda":
            return self._on_gpu()
        return _COUNTED if self._inside else self

    def handling(self) -> AbstractContextManager[object]:
        """Count all that the worker does inside, where its own core is what computes."""
        return _COUNTED if self._device.type == "cuda" else self.running()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what passes inside, in what is handled."""
        begun = time.perf_counter()
        yield
        self._begun += time.perf_counter() - begun

    def __enter__(self) -> None:
        self._inside, self._begun = True, time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = False
        if kind is None:
            self._seconds += time.perf_counter() - self._begun

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        first.record(stream)
        yield
        last.record(stream)
        self._pending.append((first, last))

    def seconds(self) -> float:
        """The sum, of what has ended so far."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        return self._seconds
