"""Frames from an outbox over gRPC to an inbox, and what happens where a neighbour is lost."""

import threading

import pytest
import torch

from workers.device.copies import CopyStreams, OnHost
from workers.links.frames import BACKWARD, FORWARD, FrameId
from workers.links.inbox import Inbox
from workers.links.outbox import Outbox
from workers.links.transport import Neighbours, StageService

CPU = torch.device("cpu")


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
    box.on_arrival = lambda frame: heard.append((frame.id.kind, frame.id.micro_batch))
    outbox = Outbox(Neighbours([address], "the next stage", 0), staging)
    generator = torch.Generator().manual_seed(0)
    sent = []

    def frame_id(number):
        return FrameId(BACKWARD if number % 2 else FORWARD, "train", 0, number)

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
        outbox.send(frame_id(number), tensors)
    outbox.end("train")
    assert box.ended("train", 1)
    for number, tensors in enumerate(sent):
        frame = box.take(frame_id(number))
        assert frame.wants_gradient == {"bits", "single"}
        assert frame.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert frame.tensors[name].dtype == tensor.dtype
            torch.testing.assert_close(frame.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert sorted(heard) == sorted(((FORWARD, BACKWARD)[n % 2], n) for n in range(12))
    outbox.close()
