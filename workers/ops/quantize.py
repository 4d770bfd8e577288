"""`heterps::quantize_rows` and `dequantize_rows`: rows of float32 in fewer bytes, for the wire.

int8: each row with a scale of its own, max |x| / 127, the nearest of 255 steps; off by at most half
a scale. A row of zeros has scale 0; one with an infinity or NaN comes back as NaN throughout.
float16: each value to the nearest, beyond 65504 to that; no scales.
Where there is no native kernel for the device, torch's own operators do the same.
"""

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native, native_for, stream
from workers.ops.operation import operation

FORMATS = ("int8", "float16")
_LARGEST = 65504.0  # of float16


@operation("heterps::quantize_rows")
def _quantize_rows(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    if form not in FORMATS:
        raise ValueError(f"quantize_rows: form: expected int8 or float16, got {form}")
    if x.dim() != 2 or x.dtype != torch.float32:
        raise ValueError(
            f"quantize_rows: x: expected float32 [rows, width], got {x.dtype} {list(x.shape)}"
        )
    if form == "float16":
        return x.clamp(-_LARGEST, _LARGEST).half(), x.new_empty(0)
    if native_for(x):
        values, scales = _quantize_empty(x, form)
        with device_of(x):
            _ops.quantize_rows(native(x), values, scales, stream(x), torch.get_num_threads())
        return values, scales
    most = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(len(x))
    scales = torch.where(x.isfinite().all(dim=1), most / 127, torch.nan)
    steps = (x / scales.unsqueeze(1)).round().clamp(-127, 127)
    return torch.where((scales > 0).unsqueeze(1), steps, 0).to(torch.int8), scales


@_quantize_rows.register_fake
def _quantize_empty(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    if form == "float16":
        return x.new_empty(x.shape, dtype=torch.float16), x.new_empty(0)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0])


@operation("heterps::dequantize_rows")
def _dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    if values.dtype == torch.float16:
        return values.float()
    if values.dim() != 2 or values.dtype != torch.int8 or scales.shape != values.shape[:1]:
        raise ValueError(
            "dequantize_rows: expected int8 [rows, width] with a scale each, or float16, got "
            f"{values.dtype} {list(values.shape)} and scales {list(scales.shape)}"
        )
    x = scales.new_empty(values.shape)
    if not native_for(x):
        return values * scales.unsqueeze(1)
    with device_of(x):
        _ops.dequantize_rows(native(values), native(scales), x, stream(x), torch.get_num_threads())
    return x


@_dequantize_rows.register_fake
def _(values: Tensor, scales: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)


def quantize_rows(x: Tensor, form: str = "int8") -> tuple[Tensor, Tensor]:
    """Rows [R, D] of float32 as (values [R, D], scales [R], none of float16).

    Raises:
        ValueError: another dtype or shape, or a form other than int8 and float16.
    """
    values, scales = _quantize_rows(x, form)
    return values, scales


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_rows` gave, as float32 [R, D] again.

    Raises:
        ValueError: another dtype or shape.
    """
    x: Tensor = _dequantize_rows(values, scales)
    return x
