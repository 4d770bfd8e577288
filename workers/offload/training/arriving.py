"""Experts that change out of memory, as they arrive: each brought to where it should be by now."""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing

from torch import Tensor

from chassis.closing import Closing
from workers.offload.slots.store import Stats
from workers.offload.training.order import Order
from workers.offload.training.write_back import ChangingCache


class ArrivingExperts(Closing):
    """The base of what trains experts out of memory.

    Args:
        what: is trained, for errors.

    Attributes:
        broken: the error that ended it; from then on nothing arrives.
    """

    def __init__(self, store: ChangingCache, what: str) -> None:
        self._store, self._what = store, what
        self.broken: BaseException | None = None
        self._order = Order()

    @property
    def stats(self) -> Stats:
        """Hits, misses, bytes and times so far."""
        return self._store.stats

    @property
    def bytes_written(self) -> int:
        """To the file, of experts that had changed."""
        return self._store.written

    def arrive(
        self, layer: int, experts: Sequence[int]
    ) -> Generator[tuple[int, dict[str, Tensor]], None, None]:
        """Experts of a layer as they come, in its forward or its backward.

        Those that the next one is likely to need are read behind them.

        Yields:
            The expert and its tensors by name, as they are before this step: views, until the next
            is asked for.

        Raises:
            RuntimeError: it was broken off.
        """
        yield from self._bring(layer, experts, self._order.follow(layer, experts))

    def _bring(
        self, layer: int, experts: Sequence[int], ahead: Sequence[tuple[int, int]] = ()
    ) -> Generator[tuple[int, dict[str, Tensor]], None, None]:
        """The same, for whatever else; `ahead` are layers and experts that come next."""
        if self.broken is not None:
            raise RuntimeError(f"{self._what} was broken off") from self.broken
        at = self._store.packed.layers[layer]
        try:
            with closing(self._store.arrivals(layer, experts, lambda: ahead)) as arrivals:
                for ready in arrivals:
                    for e, place in ready.places.items():
                        tensors = {one.name: one.of(ready.memory[place]) for one in at.tensors}
                        self._catch_up(layer, e, tensors)
                        yield e, tensors
        except GeneratorExit:
            raise
        except BaseException as error:  # what was to be written, or read, may be nowhere else
            self.broken = error
            raise

    def _told(self, steps: int) -> str:
        """What the disk has cost in so many steps, in a line."""
        stats, each = self.stats, max(1, steps)
        return (
            f"{steps} steps with experts out of memory: waited {stats.waited / each:.3f} s a step "
            f"for the disk, read {stats.bytes_read / each / 1e6:,.0f} MB of it and wrote "
            f"{self.bytes_written / each / 1e6:,.0f}, hit rate {stats.hit_rate:.0%}, "
            f"{stats.ahead / max(1, stats.misses):.0%} of misses read ahead"
        )

    @abstractmethod
    def _catch_up(self, layer: int, expert: int, tensors: dict[str, Tensor]) -> None:
        """Make the steps that an expert which has arrived lacks."""
