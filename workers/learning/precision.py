"""Mixed precision: a job's `train.precision` by autocast, and the loss scale that fp16 needs.

Parameters, their gradients' sums and optimizer state stay float32; what autocast computes in 16
bits crosses stages as it is. Micikevicius et al., "Mixed precision training" (arXiv 1710.03740).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = {"": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionError(ValueError):
    """A precision that this plan or device cannot compute in."""


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
    def of(name: str, device: torch.device, stages: int = 1) -> "Precision":
        """The precision of that name, as in job files.

        Args:
            name: fp32 | bf16 | fp16; empty for fp32.
            device: of the stage.
            stages: of the plan.

        Raises:
            PrecisionError: no such name, fp16 over several stages, or a device without it.
        """
        if name not in _DTYPES:
            raise PrecisionError(f"train.precision: got {name!r}, expected one of fp32, bf16, fp16")
        if name == "fp16" and stages > 1:
            # Whether a step is skipped must be the same everywhere, and the first stage's gradients
            # are the last to be known.
            raise PrecisionError(
                f"train.precision: got 'fp16' with a plan of {stages} stages, expected bf16 or "
                "fp32, or a plan of one stage (schedule.pin)"
            )
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


@dataclass(slots=True)
class LossScale:
    """A factor of the loss, as large as gradients allow: float16 has no small numbers.

    Halved after a step whose gradients were not finite, which is skipped; doubled after `interval`
    good ones in a row. `torch.amp.GradScaler` does this for one optimizer; here the gradients of
    all workers of a stage count, and those of embedding rows, too.

    Attributes:
        value: the factor.
    """

    value: float = 2.0**16
    interval: int = 2000
    _good: int = 0

    def unscale(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide gradients by the factor in place.

        Returns:
            float32 []: 1 if one is not finite, else 0.
        """
        some = [gradient for gradient in gradients if gradient.numel()]
        if not some:
            return torch.zeros(())
        largest = torch.nn.utils.get_total_norm(some, norm_type=float("inf"))
        torch._foreach_mul_(some, 1.0 / self.value)
        return (~largest.isfinite()).float()

    def update(self, finite: bool) -> None:
        """Take in how a step went."""
        if not finite:
            self.value, self._good = self.value / 2, 0
            return
        self._good += 1
        if self._good == self.interval:
            self.value, self._good = self.value * 2, 0
