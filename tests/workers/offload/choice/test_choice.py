"""What is expected of each mode, and which is chosen."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heterps import MoE, offload, pack_experts
from workers.offload.choice import cost
from workers.offload.choice.cost import (
    Needs,
    Speeds,
    expect_cache,
    expect_ring,
    needs_of,
    of_chance,
)
from workers.offload.choice.replay import best
from workers.offload.choice.trace import Call, Trace, TracedLayer, TraceError, read_trace, record
from workers.offload.experts.layout import LayerAt, TensorAt, placed
from workers.offload.slots.ring import plan_ring


def layers_of(experts: int, count: int) -> tuple[LayerAt, ...]:
    tensors = (TensorAt("w", torch.float32, (1024,)),)
    return placed(LayerAt(str(i), experts, "", tensors) for i in range(count))


def test_a_cache_takes_the_slower_of_reads_and_hits_and_computes_what_came_last() -> None:
    speeds = Speeds(scattered=1e6, in_order=2e6, expert=0.01)
    slow_disk = expect_cache(Needs(needed=20, missed=10, bytes_read=1e6), 4, speeds)
    assert slow_disk.seconds == pytest.approx(1.0 + 4 * 0.01)
    assert slow_disk.hit_rate == 0.5
    slow_cores = expect_cache(Needs(needed=2000, missed=2, bytes_read=1e6), 4, speeds)
    assert slow_cores.seconds == pytest.approx(1998 * 0.01 + 2 * 0.01)
    all_there = expect_cache(Needs(needed=20, missed=0, bytes_read=0), 4, speeds)
    assert all_there.seconds == pytest.approx(0.2)


@given(memory=st.integers(2, 50))
def test_a_ring_reads_what_does_not_stay(memory: int) -> None:
    layers = layers_of(8, 4)
    speeds = Speeds(scattered=1.0, in_order=4096.0, expert=1e-9)
    expected = expect_ring(layers, plan_ring(layers, memory * 4096), speeds, 32)
    staying = 32 if memory >= 32 else max(0, memory - 3)
    assert expected.bytes_read >= (32 - staying) * 4096
    assert expected.seconds == pytest.approx(max(expected.bytes_read / 4096, 32e-9))
    assert expected.hit_rate == pytest.approx(1 - expected.bytes_read / 4096 / 32)


def test_chance_needs_what_it_should_and_knows_the_cliff() -> None:
    layers = layers_of(16, 3)
    trace = of_chance(layers, [2, 2, 2], 5)
    needed = sum(len(call.experts) for call in trace.calls) / len(trace.calls)
    assert needed == pytest.approx(16 * (1 - (1 - 2 / 16) ** 5), rel=0.05)
    everything = of_chance(layers, [2, 2, 2], 500)
    assert all(len(call.experts) == 16 for call in everything.calls)
    assert needs_of(everything, 32, "lru").missed == 48  # all but one layer: that one is next
    assert needs_of(everything, 48, "lru").missed == 0


@pytest.mark.parametrize(("scattered", "mode"), [(1e3, "ring"), (1e12, "cache")])
def test_the_faster_mode_is_chosen_and_both_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scattered: float, mode: str
) -> None:
    monkeypatch.setattr(cost, "_read", lambda *_: scattered)
    monkeypatch.setattr(
        "workers.offload.choice.choice.measure", lambda *_: Speeds(scattered, 1e6, expert=1e-9)
    )
    model = nn.Sequential(MoE(16, 8, 16, seed=1), MoE(16, 8, 16, seed=2)).eval()
    extent = pack_experts(model, tmp_path / "experts")[0].extent
    with offload(model, 5 * extent, path=tmp_path / "experts", batch=64) as handle:
        assert handle.mode == mode
        assert [one.mode for one in handle.expected] == ["cache", "ring"]
        assert min(handle.expected, key=lambda one: one.seconds).mode == mode


def test_the_machine_is_measured(tmp_path: Path) -> None:
    model = nn.Sequential(MoE(16, 8, 16, seed=1), MoE(16, 8, 16, seed=2)).eval()
    with offload(model, "20KB", path=tmp_path / "experts", batch=8) as handle:
        assert all(0 < one.seconds < 60 for one in handle.expected)
        assert all(one.mode in str(one) for one in handle.expected)


def test_a_trace_chooses_the_policy(tmp_path: Path) -> None:
    model = nn.Sequential(MoE(16, 8, 16, seed=1), MoE(16, 8, 16, seed=2)).eval()
    with torch.no_grad(), record(model, tmp_path / "trace"):
        for i in range(40):
            model(torch.randn(1, 16, generator=torch.Generator().manual_seed(i)))
    known = read_trace(tmp_path / "trace")
    extent = pack_experts(model, tmp_path / "experts")[0].extent
    with offload(
        model, 6 * extent, path=tmp_path / "experts", mode="cache", like=tmp_path / "trace"
    ) as handle:
        assert handle.policy == best(known, 6).policy


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    model = MoE(16, 8, 16, seed=1).eval()
    other = Trace((TracedLayer("", 9, 4096),), (Call(0, 1, (1,)),) * 9)
    with pytest.raises(TraceError, match=r"like: expected the layers \[\('', 8\)\]"):
        offload(model, "1MB", path=tmp_path / "experts", like=other)
    short = Trace((TracedLayer("", 8, 4096),), (Call(0, 1, (1,)),) * 9)
    with pytest.raises(TraceError, match="two forwards of 5 at least, got 9"):
        offload(model, "1MB", path=tmp_path / "experts", like=short, batch=5)
