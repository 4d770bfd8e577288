"""Mixed precision: what is refused, the loss scale, and 16-bit values between stages."""

import threading

import pytest
import torch

from protos import stage_pb2
from workers.device.copies import CopyStreams, OnHost
from workers.learning.precision import LossScale, Precision, PrecisionError
from workers.links.inbox import BACKWARD, FORWARD, Inbox
from workers.links.outbox import Outbox
from workers.links.transport import Neighbours, StageService

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
    with pytest.raises(PrecisionError, match="got 'fp16' with a plan of 2 stages"):
        Precision.of("fp16", CPU, stages=2)
    assert Precision.of("bf16", CPU, stages=2).loss_scale() is None


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_found_and_the_scale_halved(bad):
    scale = LossScale(value=8.0, interval=2)
    good = [torch.full((3,), 16.0), torch.empty(0, 4), torch.tensor([[1.0]])]
    assert scale.unscale(good).item() == 0
    assert [g.tolist() for g in good] == [[2.0] * 3, [], [[0.125]]]
    assert scale.unscale([*good, torch.tensor([0.0, bad])]).item() > 0
    assert scale.unscale([]).item() == 0
    scale.update(finite=False)
    assert scale.value == 4
    for _ in range(3):
        scale.update(finite=True)
    assert scale.value == 8
    scale.update(finite=False)
    for _ in range(2):
        scale.update(finite=True)
    assert scale.value == 8


@pytest.fixture
def inbox():
    """An inbox that is served, and its address."""
    box = Inbox(threading.Event())
    server = StageService(box).serve("127.0.0.1:0", threads=4)
    yield box, server.address
    server.stop(0.1)


@pytest.mark.parametrize("staging", [OnHost(), CopyStreams(CPU)], ids=["at once", "behind"])
def test_16_bit_values_cross_stages_as_they_are(inbox, staging):
    box, address = inbox
    heard = []
    box.on_arrival = lambda kind, parcel: heard.append((kind, parcel.micro_batch))
    outbox = Outbox(Neighbours([address], "the next stage", 0), staging)
    generator = torch.Generator().manual_seed(0)
    sent = []
    for number in range(12):
        x = torch.randn(4, 3, generator=generator)
        tensors = {
            "bits": x.bfloat16().t().requires_grad_(),
            "half": x.half(),
            "single": x.clone().requires_grad_(),
            "scalar": torch.tensor(float("nan"), dtype=torch.bfloat16),
            "none": torch.empty(0, 2, dtype=torch.bfloat16),
            "label": torch.arange(4),
        }
        sent.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
        kind = stage_pb2.BACKWARD if number % 2 else stage_pb2.FORWARD
        outbox.send(kind, "train", 0, number, tensors, samples=4, weight=0.5)
    outbox.end("train")
    assert box.ended("train", 1)
    for number, tensors in enumerate(sent):
        parcel = box.take(BACKWARD if number % 2 else FORWARD, "train", 0, number)
        assert parcel.wants_gradient == {"bits", "single"}
        assert (parcel.samples, parcel.weight) == (4, 0.5)
        assert parcel.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert parcel.tensors[name].dtype == tensor.dtype
            torch.testing.assert_close(parcel.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert sorted(heard) == sorted(((FORWARD, BACKWARD)[n % 2], n) for n in range(12))
    outbox.close()
