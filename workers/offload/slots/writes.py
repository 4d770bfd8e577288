"""A write of an expert by the threads that read experts."""

import os

from workers.offload.engine import _reads
from workers.offload.experts.trained import TrainedExperts


class Write:
    """An expert, to its place from memory that stays as it is until that is done.

    Args:
        packed: the file.
        layer, expert: of the file, and of the layer.
        extent: page-aligned, as long as one.
    """

    __slots__ = ("expert", "layer", "native", "packed")

    def __init__(self, packed: TrainedExperts, layer: int, expert: int, extent: memoryview) -> None:
        self.packed, self.layer, self.expert = packed, layer, expert
        self.native = packed.native_write(layer, expert, extent)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.native.done

    def end(self) -> None:
        """Have the file know of it, once it is done.

        Raises:
            OSError: the disk fails, or is full.
        """
        kind, number, _, checksum = self.native.outcome
        if kind is _reads.Kind.ERRNO:
            raise OSError(number, os.strerror(number), self.packed.path)
        if kind is not _reads.Kind.FINE:
            raise RuntimeError(f"{self.packed.path}: what is called before writes has failed")
        self.packed.was_written(self.layer, self.expert, checksum)
