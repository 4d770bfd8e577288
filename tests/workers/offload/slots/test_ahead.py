"""Experts that are read before it is certain that they are needed: only time depends on it."""

import random
import time
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heterps import MoE, offload, pack_experts
from tests.workers.offload.running.test_offload import Slow
from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError, view_of
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.cache import Cache
from workers.offload.slots.policy import POLICIES
from workers.offload.slots.readers import _PART_AHEAD, DroppedError, Read, Readers

LAYERS, EXPERTS = 3, 7


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.ModuleList]:
    path = tmp_path_factory.mktemp("ahead") / "experts"
    layers = nn.ModuleList([MoE(16, EXPERTS, 16, seed=i) for i in range(LAYERS)])
    pack_experts(layers, path)
    return path, layers


calls = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sets(st.integers(0, EXPERTS - 1), max_size=4),
        st.lists(
            st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)),
            max_size=4,
            unique=True,
        ),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(
    calls=calls,
    slots=st.integers(1, 9),
    ahead=st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)),
    slow=st.booleans(),
)
def test_whatever_is_guessed_what_is_given_and_who_is_in_memory_are_the_same(
    packed: tuple[Path, nn.ModuleList],
    calls: list[tuple[int, set[int], list[tuple[int, int]]]],
    slots: int,
    ahead: int,
    policy: str,
    slow: bool,
) -> None:
    path, layers = packed
    file = Slow(path) if slow else PackedExperts(path)
    with (
        Cache(file, slots, POLICIES[policy](), 2, ahead) as cache,
        Cache(PackedExperts(path), slots, POLICIES[policy](), 2) as without,
    ):
        for layer, wanted, likely in calls:
            got = []
            for ready in cache.arrivals(layer, sorted(wanted), lambda likely=likely: likely):
                for e, place in ready.places.items():
                    w1 = cache.packed.layers[layer].tensors[0].of(ready.memory[place])
                    assert torch.equal(w1, layers[layer].w1[e])
                    got.append(e)
            assert sorted(got) == sorted(wanted)
            for _ in without.arrivals(layer, sorted(wanted)):
                pass
        ours, theirs = cache.stats, without.stats
        assert (ours.hits, ours.misses) == (theirs.hits, theirs.misses)
        under_way = sum(len(read.into[0]) for _, read in cache._ahead.values())
        assert ours.bytes_read - ours.bytes_wasted - under_way == theirs.bytes_read
        assert ours.ahead <= ours.misses


def arrive(cache: Cache, layer: int, wanted: list[int], likely: list[tuple[int, int]]) -> None:
    for _ in cache.arrivals(layer, wanted, lambda: likely):
        pass


def test_right_guesses_are_counted_and_cost_nothing(packed: tuple[Path, nn.ModuleList]) -> None:
    with Cache(PackedExperts(packed[0]), 9, POLICIES["lru"](), 2, 2) as cache:
        draw = random.Random(0)
        needed = [sorted(draw.sample(range(EXPERTS), 2)) for _ in range(30)]
        for i, (now, then) in enumerate(pairwise(needed)):
            arrive(cache, i % LAYERS, now, [((i + 1) % LAYERS, e) for e in then])
        stats = cache.stats
        # All but those of the first layer, which nobody guessed.
        assert stats.ahead == stats.misses - 2 > 0
        assert stats.bytes_wasted == 0


def test_guesses_that_are_wrong_too_often_are_not_read_until_they_are_right_again(
    packed: tuple[Path, nn.ModuleList], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def begin_ahead(self: Readers, read: Read) -> None:
        begun.append(read.key)
        self.begin(read)

    monkeypatch.setattr(Readers, "begin_ahead", begin_ahead)
    with Cache(PackedExperts(packed[0]), 6, POLICIES["lru"](), 2, 1) as cache:

        def call(i: int, needed: int, guess: int) -> None:
            own = [*cache._spare, *cache._ahead.values()]
            while any(read is not None and not read.done for _, read in own):
                time.sleep(0.001)  # so that there is a place for each guess
            arrive(cache, i % 2, [needed], [((i + 1) % 2, guess)])

        for i in range(100):
            call(i, i % 6, 6)  # never needed
        assert set(begun) == {6, EXPERTS + 6}
        assert 10 < len(begun) < 40
        count = len(begun)
        for i in range(100, 150):
            call(i, i % 6, 6)
        assert len(begun) == count
        for i in range(150, 250):  # ten experts in turn, for which 6 slots are too few
            call(i, i % 5, (i + 1) % 5)
        assert len(begun) > count + 50
        assert cache.stats.ahead == len(begun) - count - 1  # the last one has nobody who needs it


def test_a_damaged_expert_is_told_of_where_it_is_needed_alone(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    [layer] = pack_experts(MoE(16, 6, 16, seed=1), path)
    whole = path.read_bytes()
    at = layer.at(5) + 100
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with Cache(PackedExperts(path, direct=False), 3, POLICIES["lru"](), 2, 1) as cache:
        for _ in range(3):
            arrive(cache, 0, [0], [(0, 5)])
            arrive(cache, 0, [1], [])
            arrive(cache, 0, [2], [(0, 5)])
            with pytest.raises(ExpertFileError, match="expert 5: expected checksum"):
                arrive(cache, 0, [5], [])
        path.write_bytes(whole)
        arrive(cache, 0, [0], [(0, 5)])
        arrive(cache, 0, [5], [])


def test_of_a_read_that_is_dropped_nothing_more_is_read(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    [layer] = pack_experts(MoE(512, 2, 1024, seed=1), path)
    assert layer.extent == 4 << 20
    parts_of_all = layer.extent // _PART_AHEAD

    parts: list[int] = []
    begun, goes_on = Event(), Event()

    class Held(PackedExperts):
        def native_read(self, *given: Any) -> _reads.Transfer:
            def hold(_: int, at: int) -> None:
                parts.append(at)
                begun.set()
                goes_on.wait()

            return super().native_read(*given, hold)

    file = Held(path)
    into = torch.empty(layer.extent + 4096, dtype=torch.uint8)
    into = into[-into.data_ptr() % 4096 :][: layer.extent]
    with file, Readers(2, ahead=True) as readers:
        read = Read(file, 0, 0, 0, [view_of(into)])
        readers.begin_ahead(read)
        begun.wait()
        saved = readers.drop(read)
        goes_on.set()
        readers.wait(read)
        assert isinstance(read.error, DroppedError)
        assert saved == layer.extent - _PART_AHEAD
        assert parts == [0]
        again = Read(file, 1, 0, 0, [view_of(into)])
        readers.begin_ahead(again)
        readers.hurry(again)
        readers.wait(again)
        assert again.error is None
        assert len(parts) == 1 + parts_of_all
        whole = Read(file, 2, 0, 1, [view_of(into)])
        readers.begin_ahead(whole)
        readers.wait(whole)
        assert whole.error is None
        assert readers.drop(whole) == 0
        assert whole.error is None
        assert not readers.flying


def test_a_models_gates_guess_for_the_next_layer(tmp_path: Path) -> None:
    """Layers that are alike in their gates, so that what the first one says is right."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MoE(16, 32, 16) for _ in range(4))).eval()
    for layer in model:
        with torch.no_grad():
            layer.gate.weight.copy_(model[0].gate.weight)
            layer.w2.mul_(0)
    extent = pack_experts(model, tmp_path / "experts")[0].extent

    class Add(nn.Module):
        """So that the input of each layer is that of the first."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = x + layer(x)
            return x

    whole = Add()
    whole.layers = model
    with (
        torch.no_grad(),
        offload(whole, 20 * extent, path=tmp_path / "other", mode="cache") as handle,
    ):
        assert (handle.slots, handle.ahead) == (18, 2)
        for _ in range(50):
            whole(torch.randn(1, 16))
        stats = handle.stats
        first = stats.misses - stats.ahead
        assert stats.bytes_wasted == 0
        assert 0 < first <= 100  # of the first layer's alone, which none is before
        assert stats.ahead > first
        assert "of misses read ahead" in handle.line()
