"""What a micro-batch takes to another stage, where that takes long."""

import time

import pytest

from ps import LocalShards
from workers.links.frames import Frame
from workers.profiling.crossing import time_crossing

pytest.importorskip("ps.server")
_SLOW_S = 0.01


def test_what_frames_take_is_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes there and one comes back; a single stage sends none."""
    parts = Frame.parts

    def slow(self: Frame, sender: int) -> object:
        time.sleep(_SLOW_S)
        return parts(self, sender)

    monkeypatch.setattr(Frame, "parts", slow)
    with LocalShards(1) as shards:
        assert time_crossing(shards.addresses).seconds >= _SLOW_S


def test_what_workers_compute_for_frames_keeps_each_of_them_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As much in the one that sends it there as in the one that sends it back."""
    parts = Frame.parts

    def busy(self: Frame, sender: int) -> object:
        until = time.thread_time() + _SLOW_S
        while time.thread_time() < until:
            pass
        return parts(self, sender)

    monkeypatch.setattr(Frame, "parts", busy)
    with LocalShards(1) as shards:
        found = time_crossing(shards.addresses)
    assert found.handling_s >= 0.9 * _SLOW_S
    assert found.seconds >= _SLOW_S


def test_what_a_byte_takes_of_a_worker_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two sends one frame, of as many bytes as come back to it."""
    parts = Frame.parts
    byte_s = 4e-9

    def busy(self: Frame, sender: int) -> object:
        until = time.thread_time() + byte_s * sum(each.nbytes for each in self.tensors.values())
        while time.thread_time() < until:
            pass
        return parts(self, sender)

    monkeypatch.setattr(Frame, "parts", busy)
    with LocalShards(1) as shards:
        found = time_crossing(shards.addresses)
    assert found.byte_s >= 0.9 * byte_s / 2
    assert found.handling_s < 0.5 * byte_s * (8 << 20)
