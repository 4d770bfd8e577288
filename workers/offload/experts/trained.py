"""A file of experts that are trained: their optimizer's states beside them, written in place.

Each expert's extent has its weights, the states of these, and how many steps were made. While it is
trained its header has no checksums: whatever breaks that off, then, a file whose experts are of
different steps, or torn, is known. They come when it is closed, and then it is whole.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError, LayerAt, TensorAt, pack_header
from workers.offload.experts.packed import PackedExperts
from workers.offload.experts.source import Source
from workers.offload.experts.updates import Rule

STEPS = "steps"  # the name of the tensor that has their number, float64 [1]


def with_states(source: Source, rule: Rule) -> Source:
    """A layer's experts with states of zeros and no steps."""
    weights = source.layer.tensors
    states = [replace(one, name=f"{one.name}.{name}") for one in weights for name in rule.states]
    steps = TensorAt(STEPS, torch.float64, (1,))
    layer = replace(source.layer, tensors=(*weights, *states, steps))

    def expert(number: int) -> Sequence[Tensor]:
        made = [torch.zeros(one.shape, dtype=one.dtype) for one in (*states, steps)]
        return [*source.expert(number), *made]

    return Source(layer, expert)


class TrainedExperts(PackedExperts):
    """A file that `with_states` describes, open to be trained: `finish` makes it whole again.

    Every read is compared with what was written last.

    Args:
        path: the file.
        direct: read and write past the page cache, where the file system allows that.

    Raises:
        ExpertFileError: it is no such file, damaged, or its training was broken off.
        OSError: it cannot be read or written.
    """

    access = os.O_RDWR

    def __init__(self, path: str | Path, *, direct: bool = True) -> None:
        super().__init__(path, direct=direct, check="always")
        self.checksums = [list(layer.checksums) for layer in self.layers]
        try:
            for layer in self.layers:
                if not any(layer.checksums):
                    raise ExpertFileError(
                        f"{self.path}: its training was broken off: its experts may be of "
                        "different steps, or torn; expected a file that was closed, or saved"
                    )
            self._write_header([replace(one, checksums=(0,) * one.experts) for one in self.layers])
        except BaseException:
            self.close()
            raise

    def native_write(
        self,
        layer: int,
        expert: int,
        extent: memoryview,
        before: Callable[[int, int], None] | None = None,
    ) -> _reads.Transfer:
        """A write of an expert to its place, for threads that need no interpreter.

        Args:
            layer, expert: of the file, and of the layer.
            extent: page-aligned, as long as one; stays as it is until the write is done.
            before: as of `native_read`.
        """
        at = self.layers[layer].at(expert)
        return _reads.Transfer(self._file, self.direct, True, at, [extent], [None], before)

    def was_written(self, layer: int, expert: int, checksum: int) -> None:
        """An expert was, and reads are compared with this from now on."""
        self.checksums[layer][expert] = checksum

    def finish(self) -> None:
        """All experts are written, and of one step: the file is whole.

        Raises:
            OSError: the disk fails.
        """
        os.fsync(self._file)
        self._write_header(
            [
                replace(layer, checksums=tuple(sums))
                for layer, sums in zip(self.layers, self.checksums, strict=True)
            ]
        )

    def expected(self, layer: int, expert: int) -> int:
        """See `PackedExperts`: of what was written last."""
        return self.checksums[layer][expert]

    def _write_header(self, layers: Sequence[LayerAt]) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            header = pack_header(layers)
            done = os.pwrite(file, header, 0)
            if done != len(header):
                raise OSError(f"{self.path}: header: expected to write {len(header)} bytes")
            os.fsync(file)
        finally:
            os.close(file)
