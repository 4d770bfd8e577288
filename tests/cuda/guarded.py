"""Outputs in the middle of buffers of canaries: an op writes these and nothing beside them."""

import torch
from torch import Tensor

CANARY = 77
_MARGIN = 32


class Guarded:
    """Hands out outputs and remembers what lies around them."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def output(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An output of this shape, full of canaries."""
        size = torch.Size(shape).numel()
        self._buffers.append(torch.full((size + 2 * _MARGIN,), CANARY, dtype=dtype))
        return self._buffers[-1][_MARGIN : _MARGIN + size].view(shape)

    def check(self, *, all_written: bool = False) -> None:
        """Assert that the margins are as they were and, on demand, no element of an output is."""
        for buffer in self._buffers:
            assert (buffer[:_MARGIN] == CANARY).all()
            assert (buffer[-_MARGIN:] == CANARY).all()
            assert not (all_written and (buffer[_MARGIN:-_MARGIN] == CANARY).any())
