"""Mixed precision: a job's `train.precision` by autocast, and the loss scale that fp16 needs.

Parameters, their gradients' sums and optimizer state stay float32; what autocast computes in 16
bits crosses stages as it is. Micikevicius et al., "Mixed precision training" (arXiv 1710.03740).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_DTYPES = {"": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionError(ValueError):
    """A precision that this device cannot compute in."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a stage computes in.

    Args:
        dtype: of autocast; None computes in float32.
        device: type of the device, cpu or cuda.
    """

    dtype: torch.dtype | None
    device: str

    @staticmethod
    def of(name: str, device: torch.device) -> "Precision":
        """The precision of that name, as in job files.

        Args:
            name: fp32 | bf16 | fp16; empty for fp32.
            device: of the stage.

        Raises:
            PrecisionError: no such name, or a device without it.
        """
        if name not in _DTYPES:
            raise PrecisionError(f"train.precision: got {name!r}, expected one of fp32, bf16, fp16")
        if name == "bf16" and device.type == "cuda":
            with torch.cuda.device(device):
                if not torch.cuda.is_bf16_supported(including_emulation=False):
                    raise PrecisionError(
                        "train.precision: got 'bf16', which "
                        f"{torch.cuda.get_device_name(device)} does not compute in; expected fp16 "
                        "or fp32"
                    )
        return Precision(_DTYPES[name], device.type)

    def computing(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)

    def loss_scale(self) -> "LossScale | None":
        """What keeps gradients in range; None where the exponent is as wide as float32's."""
        return LossScale() if self.dtype == torch.float16 else None


def wide(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs as losses and callers take them: those of 16 bits in float32."""
    narrow = {n for n, o in outputs.items() if o.is_floating_point() and o.element_size() < 4}
    return {name: o.float() if name in narrow else o for name, o in outputs.items()}


@dataclass(slots=True)
class LossScale:
    """A factor of the loss, as large as gradients allow: float16 has no small numbers.

    Halved after a step whose gradients were not finite, which is skipped; doubled after `interval`
    good ones in a row. `torch.amp.GradScaler` does this for one optimizer; here the gradients of
    all stages count, and those of embedding rows, too.

    Attributes:
        value: the factor.
        good: good steps in a row, since it changed.
    """

    LEAST: ClassVar[float] = 2.0**-16  # where a gradient that is not finite never will be

    value: float = 2.0**16
    interval: int = 2000
    good: int = 0

    def update(self, finite: bool) -> None:
        """Take in how a step went."""
        if not finite:
            self.value, self.good = self.value / 2, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0
