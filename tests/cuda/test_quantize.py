"""Quantized rows against what they were, on each device that is present."""

import pytest
import torch

from tests.cuda.guarded import CANARY, Guarded
from workers import ops
from workers.ops import _ops, quantize


def test_writes_its_outputs_alone() -> None:
    table, guarded = torch.randn(5, 3, generator=torch.Generator().manual_seed(3)), Guarded()
    values, scales = guarded.output(5, 3, dtype=torch.int8), guarded.output(5)
    back = guarded.output(5, 3)
    _ops.quantize_rows(table, values, scales)
    _ops.dequantize_rows(values, scales, back)
    guarded.check()
    assert not (scales == CANARY).any()
    assert not (back == CANARY).any()


def test_quantize_rows(device: str) -> None:
    x = torch.randn(37, 19, generator=torch.Generator().manual_seed(0)).to(device)
    x[3] = 0
    x[4, 2] = float("nan")
    x[5, 1] = float("inf")
    x[6] = 1e-45
    x[7] *= 1e30
    values, scales = ops.quantize_rows(x)
    back = ops.dequantize_rows(values, scales)
    assert back[[4, 5]].isnan().all()
    assert (back[[3, 6]] == 0).all()
    good = [r for r in range(37) if r not in (4, 5)]
    error = (back[good] - x[good]).abs().amax(1)
    assert (error <= x[good].abs().amax(1) / 254 * 1.001 + 1e-44).all()
    assert values[0].abs().max() == 127
    half, none = ops.quantize_rows(x[7:] * 1e5, "float16")
    assert none.numel() == 0
    assert torch.equal(half, (x[7:] * 1e5).clamp(-65504, 65504).half())
    assert torch.equal(ops.dequantize_rows(half, none), half.float())
    for empty in (x[:0], x[:, :0]):
        assert ops.dequantize_rows(*ops.quantize_rows(empty)).shape == empty.shape


def test_quantize_opcheck_and_refusals(native_device: str) -> None:
    x = torch.randn(3, 5, device=native_device)
    for form in quantize.FORMATS:
        torch.library.opcheck(quantize._quantize_rows.op, (x, form))
        torch.library.opcheck(quantize._dequantize_rows.op, quantize._quantize_rows(x, form))
    with pytest.raises(ValueError, match="form: expected int8 or float16, got int4"):
        ops.quantize_rows(x, "int4")
    with pytest.raises(ValueError, match="x: expected float32"):
        ops.quantize_rows(x.double())
