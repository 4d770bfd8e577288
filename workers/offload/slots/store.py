"""What gives a model's layers their experts, whichever mode it runs in."""

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from chassis.closing import Closing
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.readers import Readers

# Experts that the next layer is likely to need, the likeliest first: that layer, and of it which.
Guess = Callable[[], Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Ready:
    """Experts of a layer that can be computed.

    memory: uint8 [places, bytes].
    places: of each expert, in memory.
    """

    memory: Tensor
    places: dict[int, int]


@dataclass(slots=True)
class Stats:
    """What came of the experts that were needed so far.

    hits: of them, those that were in memory.
    misses: those that were read.
    bytes_read: from the file.
    bytes_wasted: of these, of experts that were read ahead and not needed.
    ahead: of the misses, those whose read was begun before the layer was called.
    waited: seconds in which nothing was computed, for a read or a write.
    tokens: that went through the model's first layer with experts.
    seconds: in forwards of the model, without what its caller does between them.
    disk_busy: seconds of these in which reads were under way.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_wasted: int = 0
    ahead: int = 0
    waited: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    disk_busy: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Of all experts that were needed."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def disk_idle(self) -> float:
        """Share of the time in which no read was under way."""
        return 1 - min(1.0, self.disk_busy / self.seconds) if self.seconds else 1.0

    def __sub__(self, before: "Stats") -> "Stats":
        """What has come since."""
        return Stats(*(getattr(self, key) - getattr(before, key) for key in self.__slots__))


class Store(Closing):
    """Fixed memory for some of the experts of a file; for one caller at a time.

    Args:
        packed: the file; closed with this.
        readers: threads that read.
        ahead: whether it reads ahead.
    """

    slots: int
    locked: bool  # whether its memory is

    def __init__(self, packed: PackedExperts, readers: int, ahead: bool = False) -> None:
        self.packed = packed
        self.readers = Readers(readers, ahead)
        self._process = os.getpid()
        self._closed = False
        self._stats = Stats()
        self._depth = 0  # calls that are under way, of the model and its layers
        self._began = self._busy_before = 0.0

    @abstractmethod
    def arrivals(
        self, layer: int, experts: Sequence[int], guess: Guess | None = None
    ) -> Generator[Ready, None, None]:
        """All of these experts of a layer, ascending, as they come.

        What is given stays as it is until the next is asked for. Close the iterator if it is not
        exhausted. `guess` is called while experts are read, if it is of use.

        Raises:
            ExpertFileError: an expert was damaged.
            OSError: the disk fails.
            RuntimeError: it was closed, or this is a fork of the process that opened it.
        """

    @property
    def stats(self) -> Stats:
        """So far."""
        found = self._stats - Stats()
        found.waited = self.readers.waited
        return found

    def enter(self, anew: bool = False) -> None:
        """The model is called, or one of its layers.

        anew: the model is, so that no call is under way, though one may have been broken off.
        """
        self._depth = 0 if anew else self._depth
        if self._depth == 0:
            self._began, self._busy_before = perf_counter(), self.readers.busy
        self._depth += 1

    def leave(self) -> None:
        """That call has ended, well or not."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._stats.seconds += perf_counter() - self._began
            self._stats.disk_busy += self.readers.busy - self._busy_before

    def count(self, tokens: int) -> None:
        """So many tokens more have come to the model."""
        self._stats.tokens += tokens

    def require_open(self) -> None:
        """See that it can be used.

        Raises:
            RuntimeError: it was closed, or this is a fork of the process that opened it.
        """
        if self._closed:
            raise RuntimeError(f"{self.packed.path}: the experts' file was closed")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.packed.path}: expected the process that called heterps.offload; a fork of "
                "it has none of the threads that read"
            )

    def close(self) -> None:
        """Wait for reads that are under way; nothing can be read afterwards."""
        if not self._closed and os.getpid() == self._process:
            self.readers.close()
        self._closed = True
        self.packed.close()
