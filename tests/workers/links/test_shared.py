"""Frames whose bytes lie in memory that two workers of a host share: none is overwritten."""

import gc
import os
import select
import struct
import threading

import grpc
import pytest
import torch

from chassis.channels import RpcError
from protos import stage_pb2
from workers.links import line as line_module
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.inbox import Inbox
from workers.links.line import FRAME, Line
from workers.links.service import StageService
from workers.links.session import Session
from workers.links.shared import LEAST_BYTES, MOST_BYTES, Arena, Mapped, Slot
from workers.links.transport import Neighbours

HERE, THERE = "127.0.0.1", "127.0.0.2"
LEAST = LEAST_BYTES // 4  # floats


@pytest.fixture
def served():
    """An inbox that is served, and its address."""
    box = Inbox(threading.Event())
    service = StageService(Session(box))
    service.serve("127.0.0.1:0")
    yield box, service.address
    service.stop(0.1)


@pytest.fixture
def arenas(monkeypatch):
    """Those that lines make."""
    made = []

    class Kept(Arena):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(line_module, "Arena", Kept)
    return made


def frame_id(number):
    return FrameId(FORWARD, "train", 0, number)


def numbered(number, size):
    return torch.arange(size, dtype=torch.float32) + number


def slots(arena):
    return len(arena._slots)


def test_what_a_worker_holds_is_never_written_over(served, arenas):
    """More frames than slots, of many sizes; their sources change as soon as they are sent."""
    box, address = served
    peers = Neighbours([address], "the next stage", 0, HERE)
    sizes = [LEAST // 2, LEAST, LEAST + 1, 3 * LEAST, 7 * LEAST + 5]
    expected = [numbered(number, sizes[number % 5]) for number in range(100)]
    for number, tensor in enumerate(expected):
        source, second = tensor.clone(), torch.tensor([number])
        peers.send(Frame(frame_id(number), {"x": source, "y": second}))
        source.fill_(-1)
        second.fill_(-1)
    peers.flush()
    held = [box.take(frame_id(number)) for number in range(100)]
    for number, frame in enumerate(held):
        assert torch.equal(frame.tensors["x"], expected[number])
        assert torch.equal(frame.tensors["y"], torch.tensor([number]))
    (arena,) = arenas
    assert slots(arena) == 64
    assert not arena._free
    # What is let go is used again, and only that.
    kept = held[1::2]
    del held, frame
    for number in range(200, 300):
        peers.send(Frame(frame_id(number), {"x": numbered(number, 3 * LEAST)}))
        assert torch.equal(box.take(frame_id(number)).tensors["x"], numbered(number, 3 * LEAST))
    for number, frame in zip(range(1, 100, 2), kept, strict=True):
        assert torch.equal(frame.tensors["x"], expected[number])
    assert slots(arena) == 64
    peers.close()
    for number, frame in zip(range(1, 100, 2), kept, strict=True):
        assert torch.equal(frame.tensors["x"], expected[number])


def test_a_slot_serves_again_once_its_tensors_are_gone(served, arenas):
    """Those that autograd keeps, and views of them, count as well."""
    box, address = served
    peers = Neighbours([address], "the next stage", 0, HERE)
    results = []
    for number in range(30):
        peers.send(Frame(frame_id(number), {"x": numbered(number, LEAST)}))
        x = box.take(frame_id(number)).tensors["x"].requires_grad_()
        results.append((x[1:] * x[1:]).sum())
        if len(results) == 3:
            results.pop(0).backward()
    gc.collect()
    (arena,) = arenas
    assert 3 <= slots(arena) <= 6
    for number, result in zip((28, 29), results, strict=True):
        want = (numbered(number, LEAST)[1:] ** 2).sum()
        torch.testing.assert_close(result.detach(), want)
    peers.close()


def test_small_frames_notices_and_other_hosts_share_nothing(served, arenas):
    box, address = served
    near = Neighbours([address], "the next stage", 0, HERE)
    far = Neighbours([address], "the next stage", 0, THERE)
    near.send(Frame(frame_id(0), {"x": numbered(0, 10)}))
    far.send(Frame(frame_id(1), {"x": numbered(1, LEAST)}))
    notices = Line(address, "stage 1 worker 0", HERE)
    notices.send(FRAME, stage_pb2.Frame(kind=stage_pb2.END, phase="train").SerializeToString())
    for number, size in ((0, 10), (1, LEAST)):
        assert torch.equal(box.take(frame_id(number)).tensors["x"], numbered(number, size))
    notices.flush()
    assert box.ended("train", 1)
    assert [slots(arena) for arena in arenas] == [0]
    for line in (near, far, notices):
        line.close()


@pytest.mark.parametrize("lacks", ["descriptor", "room"])
def test_without_such_memory_frames_go_through_the_socket(served, monkeypatch, lacks):
    def fails(*args):
        raise OSError(lacks)

    monkeypatch.setattr(os, "memfd_create" if lacks == "descriptor" else "posix_fallocate", fails)
    box, address = served
    peers = Neighbours([address], "the next stage", 0, HERE)
    peers.send(Frame(frame_id(0), {"x": numbered(0, LEAST)}))
    peers.flush()
    assert torch.equal(box.take(frame_id(0)).tensors["x"], numbered(0, LEAST))
    peers.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("!IQQQ", 0, 0, 4096, 4096),  # beyond the end
        struct.pack("!IQQQ", 0, 0, 0, 0),
        struct.pack("!IQQQ", 0, 1, 4096, 4096),
        struct.pack("!IQQQ", 64, 0, 4096, 4096),
        struct.pack("!IQQQ", 0, MOST_BYTES, 4096, 4096),
        struct.pack("!IQQQ", 0, 0, 1 << 63, 1 << 63),
    ],
)
@pytest.mark.parametrize("bulk", [True, False])
def test_a_message_that_names_no_slot_is_refused(served, body, bulk):
    _, address = served
    line = Line(address, "stage 1 worker 0", HERE, bulk=bulk)
    line.send(3, body)
    with pytest.raises(RpcError) as refused:
        line.flush()
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    line.close()


def test_memory_that_can_shrink_is_not_mapped(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(4096)
        with pytest.raises(OSError, match="Invalid argument"):
            Mapped(os.dup(file.fileno()), lambda number: None)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with pytest.raises(OSError, match="not sealed"):
        Mapped(unsealed, lambda number: None)


def test_a_slot_is_as_large_as_it_was_first_said_to_be():
    arena = Arena()
    data = bytes(range(256)) * 256
    slot = arena.put([data], len(data))
    mapped = Mapped(os.dup(arena.file), lambda number: None)
    assert bytes(mapped.view(slot, len(data))) == data
    with pytest.raises(ValueError, match="bytes in"):
        mapped.view(Slot(slot.number, slot.first, slot.size + 1), slot.size + 1)
    mapped.close()
    arena.close()


def test_a_slot_that_is_free_again_as_a_flush_begins_is_no_answer(served, monkeypatch):
    box, address = served
    monkeypatch.setattr(line_module, "_TIMEOUT_S", 5.0)
    peer = Neighbours([address], "peer", 0, HERE)
    peer.send(Frame(frame_id(0), {"x": numbered(0, LEAST)}))
    held = [box.take(frame_id(0))]
    take_slots = line_module._Answers.take_slots

    def just_before(answers):
        take_slots(answers)
        held.clear()
        gc.collect()
        select.select([answers._connection], [], [], 5.0)

    monkeypatch.setattr(line_module._Answers, "take_slots", just_before)
    peer.flush()
    peer.close()
