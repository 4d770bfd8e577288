"""Experts in memory in a fixed order, for forwards that need nearly all of them.

After SE-MoE's ring memory (https://arxiv.org/abs/2205.10034): sections, each experts of a layer
that follow one another, K of which are in memory. There all K travel; here those do that must, as
whatever stays need not be read: three, of which two are read while one is computed, and as many
others as the rest of the memory holds stay where they are.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from workers.offload.experts.layout import LayerAt, view_of
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.memory import fixed
from workers.offload.slots.readers import Read
from workers.offload.slots.store import Guess, Ready, Store

_SECTION = 16 << 20  # bytes of a section where memory is plenty
_TRAVELLING = 3


@dataclass(frozen=True, slots=True)
class Section:
    """Experts first to last - 1 of a layer."""

    layer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RingPlan:
    """What goes round, and what stays.

    sections: of all layers, in their order.
    sizes: of each, bytes.
    stays: of each, whether it stays.
    slots: for those that travel, each as large as the largest section.
    """

    sections: tuple[Section, ...]
    sizes: tuple[int, ...]
    stays: tuple[bool, ...]
    slots: int

    @property
    def size(self) -> int:
        """Bytes of the largest section."""
        return max(self.sizes)

    @property
    def memory(self) -> int:
        """Bytes of all slots, and of what stays."""
        staying = sum(size for size, stays in zip(self.sizes, self.stays, strict=True) if stays)
        return self.slots * self.size + staying


def plan_ring(layers: Sequence[LayerAt], memory: int) -> RingPlan:
    """Cut layers into sections for so much memory, in bytes.

    Raises:
        ValueError: it does not hold two experts.
    """
    largest = max(layer.extent for layer in layers)
    if memory < 2 * largest:
        raise ValueError(
            f"offload: memory: expected at least {2 * largest} bytes, two of the largest experts, "
            f"for mode ring, got {memory}"
        )
    sections = _cut(layers, max(largest, min(_SECTION, memory // 8)))
    size = max(_sizes(layers, sections))
    if memory < 2 * size:  # parts of a layer are not all even
        size = largest
        sections = _cut(layers, 0)
    sizes = _sizes(layers, sections)
    total = sum(sizes)
    if total <= memory:
        return RingPlan(sections, sizes, (True,) * len(sections), 0)
    slots = min(memory // size, _TRAVELLING)
    left = memory - slots * size
    stays, staying, passed = [], 0, 0
    for one in sizes:  # evenly over the round, so that reads are
        passed += one
        stays.append((staying + one) * total <= left * passed)
        staying += one if stays[-1] else 0
    return RingPlan(sections, sizes, tuple(stays), slots)


def _cut(layers: Sequence[LayerAt], wanted: int) -> tuple[Section, ...]:
    """Sections of about so many bytes, or of one expert."""
    sections = []
    for index, layer in enumerate(layers):
        parts = min(layer.experts, -(-layer.experts * layer.extent // max(1, wanted)))
        bounds = [layer.experts * i // parts for i in range(parts + 1)]
        sections += [Section(index, a, b) for a, b in pairwise(bounds)]
    return tuple(sections)


def _sizes(layers: Sequence[LayerAt], sections: Sequence[Section]) -> tuple[int, ...]:
    return tuple((one.last - one.first) * layers[one.layer].extent for one in sections)


class Ring(Store):
    """Sections of a file that go round.

    What stays is read when this is made, and what travels from then on, in the order of the file
    and whatever tokens choose. Layers that are called in another order are right, and slow.

    Args:
        packed: the file; closed with this.
        plan: of its layers.
        readers: threads that read.

    Raises:
        ExpertFileError, OSError: what stays cannot be read.
    """

    def __init__(self, packed: PackedExperts, plan: RingPlan, readers: int) -> None:
        staying = [i for i, stays in enumerate(plan.stays) if stays]
        self.slots = plan.slots + len(staying)
        memory, self.locked = fixed(plan.memory)
        kept = [plan.sizes[i] for i in staying]
        *parts, travelling = memory.split([*kept, plan.slots * plan.size])
        super().__init__(packed, readers)
        self.strays = 0  # times that another section was needed than the next
        self._sections = plan.sections
        self._of_layer: list[list[int]] = [[] for _ in packed.layers]
        for i, section in enumerate(plan.sections):
            self._of_layer[section.layer].append(i)
        self._kept = dict(zip(staying, parts, strict=True))
        self._order = [i for i, stays in enumerate(plan.stays) if not stays]
        self._place = {section: place for place, section in enumerate(self._order)}
        self._free = list(travelling.split(plan.size)) if plan.slots else []
        self._next = 0  # in order, to be read
        self._ahead: deque[tuple[Read, Tensor]] = deque()  # being read, or read; and their slots
        try:
            self._load()
            self._stats.bytes_read = 0
            self._fill()
        except BaseException:
            self.readers.close()
            raise

    def arrivals(
        self, layer: int, experts: Sequence[int], guess: Guess | None = None
    ) -> Generator[Ready, None, None]:
        """See `Store`."""
        self.require_open()
        extent = self.packed.layers[layer].extent
        for i in self._of_layer[layer]:
            section = self._sections[i]
            count = section.last - section.first
            places = {e: e - section.first for e in experts if section.first <= e < section.last}
            if i in self._kept:
                self._stats.hits += len(places)
                if places:
                    yield Ready(self._kept[i][: count * extent].view(count, extent), places)
                continue
            self._stats.misses += len(places)
            slot = self._come(i)
            if places:
                yield Ready(slot[: count * extent].view(count, extent), places)
            self._ahead.popleft()
            self._free.append(slot)
            self._fill()

    def _come(self, index: int) -> Tensor:
        """Wait until a travelling section is the first that is in memory; its slot.

        Raises:
            Exception: what its read ended with; it is begun again when it is needed again.
        """
        if not self._ahead or self._ahead[0][0].key != index:
            self.strays += 1
            self._go_to(index)
        read, slot = self._ahead[0]
        self.readers.wait(read)
        if read.error is not None:
            self._go_to(index)
            raise read.error
        return slot

    def _go_to(self, index: int) -> None:
        """Begin again from a section."""
        while self._ahead:
            read, slot = self._ahead[0]
            self.readers.wait(read)  # it may be broken off, and is not forgotten then
            self._ahead.popleft()
            self._free.append(slot)
        self._next = self._place[index]
        self._fill()

    def _fill(self) -> None:
        while self._free and self._order:
            index = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            slot = self._free.pop()
            self._ahead.append((self._begin(index, slot), slot))

    def _load(self) -> None:
        """Read what stays."""
        reads = [self._begin(i, slot) for i, slot in self._kept.items()]
        for read in reads:
            self.readers.wait(read)
            if read.error is not None:
                raise read.error

    def _begin(self, index: int, slot: Tensor) -> Read:
        section = self._sections[index]
        extent = self.packed.layers[section.layer].extent
        whole = slot[: (section.last - section.first) * extent]
        into = [view_of(one) for one in whole.split(extent)]
        read = Read(self.packed, index, section.layer, section.first, into)
        self.readers.begin(read)
        self._stats.bytes_read += len(into) * extent
        return read
