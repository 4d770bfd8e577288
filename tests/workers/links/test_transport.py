"""Frames from an outbox over lines to an inbox, and what happens where a neighbour is lost."""

import signal
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from chassis.channels import RpcError
from heterps.home import certs
from protos import codec, stage_pb2
from workers.device.copies import CopyStreams, OnHost
from workers.errors import PeerLostError
from workers.links.frames import BACKWARD, EVALUATE, FORWARD, Frame, FrameId
from workers.links.inbox import Inbox, Stopped
from workers.links.line import FRAME, NOTICE, Line
from workers.links.outbox import Outbox
from workers.links.service import StageService
from workers.links.session import Session
from workers.links.transport import Neighbours

CPU = torch.device("cpu")
HERE, THERE = "127.0.0.1", "127.0.0.2"  # two hosts, as far as names go


@pytest.fixture
def inbox():
    """An inbox that is served, and its address."""
    box = Inbox(threading.Event())
    service = StageService(Session(box))
    service.serve("127.0.0.1:0")
    yield box, service.address
    service.stop(0.1)


@pytest.mark.parametrize("staging", [OnHost(), CopyStreams(CPU)], ids=["at once", "behind"])
def test_16_bit_values_cross_stages_as_they_are(inbox, staging):
    box, address = inbox
    heard = []
    box.on_arrival = lambda frame: heard.append((frame.id.kind, frame.id.micro_batch))
    outbox = Outbox(Neighbours([address], "the next stage", 0, HERE), staging)
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


def frames(count, phase="train", step=0):
    """Forward frames of a value each."""
    return [(FrameId(FORWARD, phase, step, n), {"x": torch.tensor(float(n))}) for n in range(count)]


def test_frames_are_taken_by_name_in_any_order(inbox):
    box, address = inbox
    outbox = Outbox(Neighbours([address], "the next stage", 0, HERE), OnHost())
    sent = frames(20)
    for name, tensors in sent:
        outbox.send(name, tensors)
    outbox.end("train")
    for name, tensors in reversed(sent):
        assert box.has(name)
        assert box.take(name).tensors["x"] == tensors["x"]
        assert not box.has(name)
    outbox.close()


def test_micro_batches_go_to_their_workers_and_ends_to_all():
    stop = threading.Event()
    boxes = [Inbox(stop) for _ in range(3)]
    services = [StageService(Session(box)) for box in boxes]
    for service in services:
        service.serve("127.0.0.1:0")
    senders = [
        Outbox(Neighbours([s.address for s in services], "the next stage", rank, HERE), OnHost())
        for rank in range(2)
    ]
    names = [name for name, _ in frames(9)]
    for name, tensors in frames(9):
        senders[name.micro_batch % 2].send(name, tensors)
    senders[0].end("train")
    assert not any(box.ended("train", 2) for box in boxes)
    senders[1].end("train")
    for index, box in enumerate(boxes):
        assert box.ended("train", 2)
        assert [n.micro_batch for n in names if box.has(n)] == [index, index + 3, index + 6]
    for closing in senders:
        closing.close()
    for service in services:
        service.stop(0.1)


def test_evaluation_frames_come_in_the_order_of_arrival_until_the_end(inbox):
    box, address = inbox
    peers = Neighbours([address], "the next stage", 0, HERE)
    outbox = Outbox(peers, OnHost())
    for number in (5, 2, 9):
        outbox.send(FrameId(EVALUATE, "valid", 0, number), {"x": torch.zeros(1)})
        peers.flush()
    outbox.end("valid")
    found = [box.next_evaluation("valid", 1) for _ in range(4)]
    assert [f and f.id.micro_batch for f in found] == [5, 2, 9, None]
    outbox.close()


def test_between_hosts_frames_of_any_size_travel_under_tls(tmp_path, monkeypatch):
    certs.make(tmp_path, [HERE, THERE])
    for name, value in certs.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    box = Inbox(threading.Event())
    service = StageService(Session(box))
    service.serve(f"{THERE}:0")
    peers = Neighbours([service.address], "the next stage", 0, HERE)
    outbox = Outbox(peers, OnHost())
    sizes = (1, 3_000_000, 0, 17, 5_000_000, 2)  # values; some are more than the kernel holds
    for number, size in enumerate(sizes):
        values = torch.arange(size, dtype=torch.float32)
        outbox.send(FrameId(BACKWARD, "train", 0, number), {"x": values})
    outbox.end("train")
    assert isinstance(peers._lines[0]._connection, ssl.SSLSocket)
    for number, size in enumerate(sizes):
        came = box.take(FrameId(BACKWARD, "train", 0, number)).tensors["x"]
        assert torch.equal(came, torch.arange(size, dtype=torch.float32))
    outbox.close()
    service.stop(0.1)


@pytest.mark.parametrize("staging", [OnHost(), CopyStreams(CPU)], ids=["at once", "behind"])
def test_a_lost_neighbour_is_named(staging):
    box = Inbox(threading.Event())
    service = StageService(Session(box))
    service.serve("127.0.0.1:0")
    outbox = Outbox(Neighbours([service.address], "stage 1", 0, HERE), staging)
    (name, tensors), *_ = frames(1)
    outbox.send(name, tensors)
    assert box.take(name)
    service.stop(0.0)

    def send_more():
        for name, tensors in frames(100, step=1):
            outbox.send(name, tensors)

    with pytest.raises(RpcError, match="stage 1 worker 0") as lost:
        send_more()
    assert lost.value.code == grpc.StatusCode.UNAVAILABLE
    outbox.close()


def test_who_has_all_it_waits_for_may_end_before_it_is_asked():
    box = Inbox(threading.Event())
    service = StageService(Session(box))
    service.serve(f"{HERE}:0")
    line = Line(service.address, "stage 1 worker 0", HERE)
    end = stage_pb2.Frame(kind=stage_pb2.END, phase="drain", sender=0)
    line.send(FRAME, end.SerializeToString())
    box.wait(lambda: box.ended("drain", 1))
    box.close()
    service.stop(0.1)
    line.flush()  # it has left, and had it
    line.send(FRAME, end.SerializeToString())
    with pytest.raises(RpcError, match="stage 1 worker 0") as lost:
        line.check()
    assert lost.value.code == grpc.StatusCode.UNAVAILABLE
    line.close()


def deliver(line, frame):
    line.send(FRAME, frame)
    line.flush()


def test_a_worker_that_ends_is_one_that_went_away(inbox):
    box, address = inbox
    before = Line(address, "stage 1 worker 0", HERE)
    before.send(NOTICE, stage_pb2.Notice().SerializeToString())
    before.flush()
    box.close()
    frame, _ = Frame(FrameId(FORWARD, "train", 0, 0), {}).parts(0)
    for line in (before, Line(address, "stage 1 worker 0", HERE, retry_s=0.0)):
        with pytest.raises(RpcError, match="stage 1 worker 0: this worker is ending") as refused:
            deliver(line, frame)
        assert refused.value.code == grpc.StatusCode.UNAVAILABLE
        line.close()


def die_after_a_frame(address, last):
    """Another worker's process, which sends a frame; it takes its leave or is killed, and when."""
    code = f"""
import os, signal, torch
from workers.device.copies import OnHost
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.transport import Neighbours
peer = Neighbours([{address!r}], "the next stage", 0, {HERE!r})
peer.send(Frame(FrameId(FORWARD, "train", 0, 0), {{"x": torch.ones(4)}}))
peer.flush()
{last}
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def test_who_waits_for_one_that_died_is_told_at_once(inbox):
    """By the kernel: nothing is sent, and no node has to notice."""
    box, address = inbox
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(box.take, FrameId(FORWARD, "train", 0, 1))
        die_after_a_frame(address, "")
        with pytest.raises(PeerLostError, match="without leave"):
            waits.result(10)
    assert box.take(FrameId(FORWARD, "train", 0, 0)).tensors["x"].tolist() == [1.0] * 4


@pytest.mark.parametrize("last", ["peer.leave()", "peer.close()"])
def test_who_took_leave_is_not_missed(inbox, last):
    box, address = inbox
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(box.take, FrameId(FORWARD, "train", 0, 1))
        die_after_a_frame(address, last)
        with pytest.raises(TimeoutError):
            waits.result(1)
        box.close()
        with pytest.raises(Stopped):
            waits.result(10)


def test_a_bad_frame_is_refused(inbox):
    _, address = inbox
    for head in (stage_pb2.Frame(), stage_pb2.Frame(kind=77)):
        line = Line(address, "stage 1 worker 0", HERE)
        with pytest.raises(RpcError) as refused:
            deliver(line, codec.pack(head))
        assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "kind: expected FORWARD, BACKWARD or EVALUATE" in refused.value.details
        line.close()


def test_who_waits_is_told_to_stop():
    stop = threading.Event()
    box = Inbox(stop)
    name = FrameId(FORWARD, "train", 0, 0)
    calls = (lambda: box.take(name), lambda: box.next_evaluation("valid", 1))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(call) for call in calls]
        stop.set()
        for future in waiting:
            with pytest.raises(Stopped):
                future.result(60)


def test_a_full_inbox_holds_the_sender_until_a_batch_is_taken():
    box = Inbox(threading.Event())
    batches = [Frame(FrameId(EVALUATE, "valid", 0, n), {}) for n in range(33)]
    for frame in batches[:32]:
        box.put(frame)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(box.put, batches[32])
        with pytest.raises(TimeoutError):
            held.result(0.05)
        assert box.next_evaluation("valid", 1) == batches[0]
        held.result(60)
    assert [box.next_evaluation("valid", 1) for _ in range(32)] == batches[1:]
