"""Mixed precision: what is refused, and the loss scale."""

import pytest
import torch

from workers.learning.precision import LossScale, Precision, PrecisionError

CPU = torch.device("cpu")


def test_what_a_stage_computes_in():
    for name in ("", "fp32"):
        with Precision.of(name, CPU).computing():
            assert not torch.is_autocast_enabled("cpu")
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Precision.of(name, CPU).computing():
            out = layer(x)
        assert out.dtype == dtype
        out.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


def test_what_cannot_be_is_refused_by_its_key():
    with pytest.raises(PrecisionError, match=r"train\.precision: got 'half', expected one of fp32"):
        Precision.of("half", CPU)
    assert Precision.of("bf16", CPU).loss_scale() is None
    assert Precision.of("fp16", CPU).loss_scale() is not None


def test_the_scale_is_halved_by_a_step_that_is_skipped_and_doubled_after_good_ones():
    scale = LossScale(value=8.0, interval=2)
    scale.update(finite=False)
    assert scale.value == 4
    for _ in range(3):
        scale.update(finite=True)
    assert scale.value == 8
    scale.update(finite=False)
    for _ in range(2):
        scale.update(finite=True)
    assert scale.value == 8
