"""Experts that change: what comes is what was left last, on a slow disk and on one that fails."""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heterps import MoE
from workers.offload.engine import _reads
from workers.offload.experts.layout import view_of
from workers.offload.experts.pack import write
from workers.offload.experts.packed import PackedExperts, aligned
from workers.offload.experts.source import of_model
from workers.offload.experts.trained import TrainedExperts, with_states
from workers.offload.experts.updates import rule_for
from workers.offload.slots.policy import POLICIES
from workers.offload.slots.readers import Read, Readers
from workers.offload.slots.residents import Residents
from workers.offload.slots.writes import Write
from workers.offload.training.write_back import ChangingCache

LAYERS, EXPERTS = 3, 5
_OPTIONS = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}


def file_of(folder: Path) -> Path:
    """Experts of layers, each with its steps beside it, in which tests note what they want."""
    path = folder / "experts"
    layers = torch.nn.ModuleList([MoE(8, EXPERTS, 8, seed=i) for i in range(LAYERS)])
    rule = rule_for(torch.optim.SGD, _OPTIONS, torch.float32)
    write([with_states(one, rule) for one in of_model(layers)], path)
    return path


Before = Callable[[bool, int, int], None]


class Watched(TrainedExperts):
    """Something is done before each read and write, and told whether it writes, and what."""

    def __init__(self, path: Path, before: Before, direct: bool = True) -> None:
        self.before = before
        super().__init__(path, direct=direct)

    def native_read(self, layer: int, first: int, *given: Any) -> _reads.Transfer:
        hook = lambda i, _: self.before(False, layer, first + i)  # noqa: E731
        return super().native_read(layer, first, *given, hook)

    def native_write(self, layer: int, expert: int, *given: Any) -> _reads.Transfer:
        hook = lambda *_: self.before(True, layer, expert)  # noqa: E731
        return super().native_write(layer, expert, *given, hook)


def visit(
    cache: ChangingCache,
    layer: int,
    experts: list[int],
    ahead: list[tuple[int, int]],
    mark: float | None = None,
) -> Iterator[tuple[int, float]]:
    """Experts and their marks; with a new one they are changed."""
    at = cache.packed.layers[layer].tensors[-1]
    for ready in cache.arrivals(layer, experts, lambda: ahead):
        for e, place in ready.places.items():
            tensor = at.of(ready.memory[place])
            yield e, float(tensor)
            if mark is not None:
                tensor.fill_(mark)
                cache.changed.add(cache.key(layer, e))


pairs = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
calls = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sets(st.integers(0, EXPERTS - 1)),
        st.lists(pairs, max_size=8, unique=True),
        st.sampled_from(["look", "change", "change", "leave", "flush"]),
    ),
    max_size=16,
)


@settings(max_examples=60)
@given(
    calls=calls,
    slots=st.integers(1, 9),
    policy=st.sampled_from(sorted(POLICIES)),
    readers=st.integers(1, 4),
    direct=st.booleans(),
    pauses=st.randoms(use_true_random=False),
)
def test_what_comes_is_what_was_left(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[int, set[int], list[tuple[int, int]], str]],
    slots: int,
    policy: str,
    readers: int,
    direct: bool,
    pauses: random.Random,
) -> None:
    """Whatever is expected, and in whatever order reads and writes end."""
    path = file_of(tmp_path_factory.mktemp("changing"))

    def pause(*_: Any) -> None:
        time.sleep(pauses.choice([0, 0, 0.0005, 0.002]))

    packed = Watched(path, pause, direct)
    marks = {(layer, e): 0.0 for layer in range(LAYERS) for e in range(EXPERTS)}
    needed = 0
    with ChangingCache(packed, slots, POLICIES[policy](), readers) as cache:
        for number, (layer, wanted, ahead, what) in enumerate(calls, 1):
            mark = float(number) if what == "change" else None
            got = []
            for e, found in visit(cache, layer, sorted(wanted), ahead, mark):
                assert found == marks[layer, e]
                got.append(e)
                if mark is not None:
                    marks[layer, e] = mark
                if what == "leave":
                    break
            if what != "leave":
                assert sorted(got) == sorted(wanted)
            if what == "flush":
                cache.write_back()
            needed += len(wanted)
            assert len(cache._residents.slot) <= slots
            assert len({*cache._residents.slot.values()}) == len(cache._residents.slot)
        stats = cache.stats
        assert cache._residents.hits + cache._residents.misses == needed
        assert cache._residents.foreseen <= cache._residents.misses
        assert 0 <= stats.bytes_wasted <= stats.bytes_read
        cache.write_back()
        packed.finish()
    with PackedExperts(path, check="always") as whole:
        for (layer, e), mark in marks.items():
            assert float(whole.expert(str(layer), e)["steps"]) == mark


@given(
    calls=st.lists(
        st.tuples(st.sets(st.integers(0, 9)), st.lists(st.integers(0, 9), unique=True)),
        max_size=12,
    ),
    slots=st.integers(1, 8),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_none_gives_way_that_is_needed_or_expected(
    calls: list[tuple[set[int], list[int]]], slots: int, policy: str
) -> None:
    residents = Residents(slots, POLICIES[policy]())
    for keys, ahead in calls:
        left, given, kept = set(keys), set[int](), set[int]()
        for turn in residents.turns_ahead(sorted(keys), ahead):
            for key, slot in turn.begin:
                assert residents.slot[key] == slot
            own = {key for key, _ in turn.begin if key in left}
            early = {key for key, _ in turn.begin} - own
            assert early <= {*ahead}
            if early:  # all others are there, or asked for
                assert left <= residents.slot.keys()
                kept |= {key for key in ahead if key in residents.slot}
            assert len(turn.give) <= 1
            assert left >= {*turn.give}
            assert residents.slot.keys() >= {*turn.give, *kept}
            left -= {*turn.give}
            given |= {*turn.give}
        assert given == keys
        assert len(residents.slot) <= slots
        assert residents.early <= residents.slot.keys()
        room = slots - len({*ahead} & residents.slot.keys())
        assert room <= 0 or {*ahead} <= residents.slot.keys()


def test_others_come_while_one_is_written_that_gave_way(tmp_path: Path) -> None:
    written, goes_on = Event(), Event()

    def hold(writes: bool, *_: int) -> None:
        if writes:
            written.set()
            goes_on.wait()

    packed = Watched(file_of(tmp_path), hold)
    with ChangingCache(packed, 4, POLICIES["lru"](), 2) as cache:
        for _ in visit(cache, 0, [0], [], 1.0):
            pass
        got = []
        for e, _ in visit(cache, 1, [0, 1, 2, 3], []):  # the last one to the slot of layer 0's
            got.append(e)
            if e == 2:
                written.wait()
                goes_on.set()
        assert got == [0, 1, 2, 3]
        assert [mark for _, mark in visit(cache, 0, [0], [])] == [1.0]


def test_what_is_expected_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    begun: list[tuple[int, int]] = []

    def note(writes: bool, layer: int, expert: int) -> None:
        assert not writes
        begun.append((layer, expert))

    packed = Watched(file_of(tmp_path), note)
    with ChangingCache(packed, 4, POLICIES["lru"](), 2) as cache:
        for _ in visit(cache, 0, [0, 1, 2], [(1, 3), (1, 4), (2, 0), (2, 1), (2, 2)]):
            pass
        reads = [*cache._reads.values()]
        assert len(reads) == 4  # all but the one that would take a place of these
        for read in reads:
            cache.readers.wait(read)
        assert sorted(begun) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (2, 0), (2, 1)]
        assert [e for e, _ in visit(cache, 1, [2, 3, 4], [])] == [3, 4, 2]
        assert begun[-1] == (1, 2)
        assert len(begun) == 8
        stats = cache.stats
        assert (stats.hits, stats.misses, stats.ahead) == (0, 6, 2)
        extent = packed.layers[0].extent
        assert (stats.bytes_read, stats.bytes_wasted) == (8 * extent, 2 * extent)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, layer: int, expert: int) -> Iterator[None]:
    """Of one expert the disk fails: reads of it, or writes."""
    real = getattr(TrainedExperts, name)

    def fail(self: TrainedExperts, at: int, first: int, *given: Any) -> _reads.Transfer:
        if (at, first) != (layer, expert):
            transfer: _reads.Transfer = real(self, at, first, *given)
            return transfer
        memory = given[0] if isinstance(given[0], list) else [given[0]]
        return _reads.Transfer(full, False, name == "native_write", 0, memory, [None], None)

    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(TrainedExperts, name, fail)
            yield
    finally:
        os.close(full)


def test_a_read_ahead_that_fails_is_told_to_who_needs_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = TrainedExperts(file_of(tmp_path))
    with ChangingCache(packed, 3, POLICIES["lru"](), 2) as cache:
        with failing(monkeypatch, "native_read", 1, 2):
            for _ in visit(cache, 0, [0], [(1, 2)]):
                pass
            for _ in visit(cache, 0, [1, 2, 3], []):  # its slot is needed by others
                pass
            for _ in visit(cache, 0, [0], [(1, 2)]):
                pass
            with pytest.raises(OSError, match="Bad file descriptor"):
                for _ in visit(cache, 1, [2], []):
                    pass
        assert [e for e, _ in visit(cache, 1, [2], [])] == [2]


def test_a_write_that_fails_is_told_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody needs the one that is lost, nor who came to its slot."""
    path = file_of(tmp_path)
    packed = TrainedExperts(path)
    with ChangingCache(packed, 1, POLICIES["lru"](), 2) as cache:
        with failing(monkeypatch, "native_write", 0, 0):
            for _ in visit(cache, 0, [0], [(1, 0)], 1.0):
                pass
            [read] = cache._reads.values()
            cache.readers.wait(read)
            assert isinstance(read.error, OSError)
            assert read.error.errno == errno.ENOSPC
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                cache.write_back()
            with pytest.raises(OSError, match="No space left"):
                for _ in visit(cache, 2, [0], []):
                    pass


def test_what_follows_waits_for_what_is_before_it(tmp_path: Path) -> None:
    begun, goes_on = Event(), Event()
    order: list[bool] = []

    def hold(writes: bool, *_: int) -> None:
        order.append(writes)
        if writes:
            begun.set()
            goes_on.wait()

    with Watched(file_of(tmp_path), hold) as packed, Readers(3) as readers:
        extent = aligned(packed.layers[0].extent)
        extent.fill_(7)
        sent = Write(packed, 0, 1, view_of(extent))
        read = Read(packed, 0, 0, 2, [view_of(extent)])
        readers.begin(sent, read)
        begun.wait()
        assert readers.drop(read) == 0  # its memory is still needed
        assert not sent.done
        assert not read.done
        goes_on.set()
        readers.wait(read)
        readers.finish(sent)
        assert read.error is None
        assert order == [True, False]
        again = aligned(packed.layers[0].extent)
        packed.read(0, 1, again)  # compared with what was written
        assert (again == 7).all()
        packed.read(0, 2, again)
        assert torch.equal(again, extent)
        assert not readers.flying
