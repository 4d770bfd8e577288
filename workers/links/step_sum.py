"""A step's tensors, summed over a stage's workers while the step goes on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workers.links.ring import SECTIONS, Bucket, BucketId, Ring, Section

_BUCKET = 1 << 20  # bytes
_NOTHING = torch.empty(0, dtype=torch.uint8)


class StepSum(Protocol):
    """Sums of one step that are under way."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Begin to sum tensors, which all workers add in the same order, dtypes and shapes.

        The tensors are to be left alone until `wait` has returned.

        Raises:
            PeerLostError: a worker is gone.
            SumError: a worker adds others.
        """
        ...

    def wait(self) -> None:
        """Return once all that was added holds the sums over the workers; add nothing after it.

        Raises:
            PeerLostError, SumError
            Stopped: this process was asked to end.
        """
        ...


class NoSum:
    """Of one worker: each tensor is its own sum."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Nothing is to be done."""

    def wait(self) -> None:
        """Nothing is to be done."""


@dataclass(slots=True)
class _Small:
    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0


def _real(tensor: Tensor) -> Tensor:
    """The tensor's memory as numbers that can be summed: of a complex one both parts."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Buckets:
    """Tensors put together: a large one is a bucket, small ones of a dtype make up one.

    Which these are follows from dtypes and sizes in the order of adding alone, so all workers make
    the same.
    """

    def __init__(self) -> None:
        self._small: dict[torch.dtype, _Small] = {}

    def add(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """The buckets that are full."""
        full = []
        for tensor in map(_real, tensors):
            if tensor.nbytes >= _BUCKET:
                full.append([tensor])
                continue
            small = self._small.setdefault(tensor.dtype, _Small())
            small.tensors.append(tensor)
            small.bytes += tensor.nbytes
            if small.bytes >= _BUCKET:
                full.append(self._small.pop(tensor.dtype).tensors)
        return full

    def rest(self) -> list[list[Tensor]]:
        """What is left, once all has been added."""
        small, self._small = self._small, {}
        return [of_dtype.tensors for of_dtype in small.values()]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket on the ring, and the tensors of each section it is a copy of; none: their memory."""

    bucket: Bucket
    groups: Sequence[Sequence[Tensor]]

    def give_back(self) -> None:
        """Give the tensors their sums."""
        first = 0
        for section, tensors in zip(self.bucket.shape.sections, self.groups, strict=False):
            part = self.bucket.bytes[first : first + section.size]
            copy_back(part.view(section.dtype), tensors)
            first += section.size


class RingSum:
    """Sums over a ring.

    Args:
        series: their name; the same on all workers, and given once.
    """

    def __init__(self, ring: Ring, series: int) -> None:
        self._ring = ring
        self._series = series
        self._buckets = Buckets()
        self._sent: list[_Sent] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """As `StepSum.add`."""
        for bucket in self._buckets.add(tensors):
            self._begin([bucket], last=False)

    def wait(self) -> None:
        """As `StepSum.wait`."""
        rest = together(self._buckets.rest())
        for bucket in rest[:-1]:
            self._begin(bucket, last=False)
        # Says that it is the last, so that workers that added more or less find out.
        self._begin(rest[-1] if rest else [], last=True)
        for sent in self._sent:
            self._ring.wait(sent.bucket)
            sent.give_back()
        self._sent = []

    def _begin(self, groups: Sequence[Sequence[Tensor]], *, last: bool) -> None:
        flats = [flattened(tensors) for tensors in groups]
        parts = [flat.view(torch.uint8) for flat in flats]
        values = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else _NOTHING
        in_place = len(groups) == 1 and is_one(groups[0]) and values.is_cpu
        bucket = self._ring.begin(
            BucketId(self._series, len(self._sent)),
            values.cpu(),
            [Section(flat.dtype, flat.nbytes) for flat in flats],
            last=last,
        )
        self._sent.append(_Sent(bucket, () if in_place else groups))


def together(buckets: Iterable[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Buckets of a dtype each, put together as sections of fewer: a message costs more than bytes.

    Larger items come first, so that all lie as their dtype asks for.
    """
    ordered = sorted(buckets, key=lambda tensors: -tensors[0].itemsize)
    return [ordered[n : n + SECTIONS] for n in range(0, len(ordered), SECTIONS)]


def is_one(tensors: Sequence[Tensor]) -> bool:
    """Whether a bucket is a tensor that can be summed where it lies."""
    return len(tensors) == 1 and tensors[0].is_contiguous()


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """A bucket as one tensor [n]: the memory of its only one, or a copy of all."""
    if is_one(tensors):
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def copy_back(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Give tensors the values of the bucket that is a copy of them."""
    if tensors:
        parts = values.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
