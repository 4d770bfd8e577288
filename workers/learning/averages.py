"""An exponential moving average of weights (Polyak and Juditsky 1992), as evaluated and saved.

After the first step it is the weights; after each later one d · average + (1 - d) · weights, as of
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(d)`. Buffers are not averaged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

AVERAGE = "average"  # what it is called among what optimizers keep


class Averages:
    """Of some parameters, which keep their order.

    Args:
        decay: d, above 0 and below 1.

    Attributes:
        tensors: the averages.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.tensors = [parameter.detach().clone() for parameter in parameters]
        self._decay = decay
        self._added = 0

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """Take in the weights after a step."""
        if not self._added:
            self.begin(parameters)
        else:
            torch._foreach_lerp_(self.tensors, list(parameters), 1 - self._decay)
        self._added += 1

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Be the weights as they are."""
        torch._foreach_copy_(self.tensors, list(parameters))

    @torch.no_grad()
    def resume(self, number: int, added: int, average: Tensor) -> None:
        """Go on with what one of them was after so many steps."""
        self.tensors[number].copy_(average)
        self._added = added

    @contextmanager
    def in_place(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Meanwhile parameters are their averages."""
        with torch.no_grad():
            kept = [parameter.detach().clone() for parameter in parameters]
            torch._foreach_copy_(list(parameters), self.tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(parameters), kept)
