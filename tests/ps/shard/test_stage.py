"""What a shard keeps of steps: over its own directory, and what it does not keep."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.engine import _native
from ps.errors import ConflictError
from ps.shard.commit import commit_step, stage_part, tally_step
from ps.shard.directory import ShardDirectory
from ps.shard.stage import part_of
from ps.shard.state import ShardState
from ps.table.buckets import routing_of
from ps.table.spec import make_spec

KEYS = np.arange(300, dtype=np.uint64)
SPEC = make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")


def _stage(state: ShardState, step: int, slot: int, value: float) -> None:
    head = pb.StageRequest(series="s", step=step, slot=slot)
    head.tables.add(table="t", dim=2, count=len(KEYS))
    stage_part(state, part_of(pack(head, KEYS, np.full((len(KEYS), 2), value, np.float32))))


def _commit(state: ShardState, step: int, slots: int, **fields: Any) -> bool:
    head = pb.CommitRequest(series="s", step=step, slots=slots, scale=1, rate=1, **fields)
    return commit_step(state, head, None, head.SerializeToString(), 1)


def _tally(state: ShardState, step: int, slots: int) -> float:
    return tally_step(state, pb.TallyRequest(series="s", step=step, slots=slots))


def _rows(state: ShardState) -> set[float]:
    return set(state.tables["t"].native.pull(KEYS, True).reshape(-1).tolist())


@pytest.mark.parametrize("folds", [0, 1, 2])
def test_parts_and_what_is_over_outlive_the_shard(tmp_path: Path, folds: int) -> None:
    """By its log alone, and by a base with a log that goes on from it."""
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(SPEC)
    _stage(state, 0, 0, -1)
    assert _commit(state, 0, 1)
    _stage(state, 1, 0, -4)
    assert _commit(state, 1, 0, drop=True)
    _stage(state, 2, 0, -1)
    for _ in range(folds):
        durable.fold()
    _stage(state, 2, 1, -2)
    _stage(state, 3, 0, -5)
    for _ in range(2):
        durable.close()
        state = ShardState()
        durable = ShardDirectory(state, tmp_path)
        assert _rows(state) == {1.0}
        _stage(state, 0, 0, -1)  # over
        assert not _commit(state, 0, 1)
        with pytest.raises(ConflictError, match="dropped"):
            _commit(state, 1, 1)
        assert _tally(state, 2, 2) == 9 * KEYS.size * 2
        with pytest.raises(ConflictError, match=r"lacks the parts of slots \[1\]"):
            _tally(state, 3, 2)
    assert _commit(state, 2, 2)
    durable.close()
    state = ShardState()
    ShardDirectory(state, tmp_path).close()
    assert _rows(state) == {4.0}
    assert not _commit(state, 2, 2)
    assert _tally(state, 3, 1) == 25 * KEYS.size * 2


def test_a_part_that_is_refused_is_not_logged(tmp_path: Path) -> None:
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(SPEC)
    for step in range(64):
        _stage(state, step, 0, 1)
    size = durable.log.bytes
    with pytest.raises(ConflictError, match="64 steps wait"):
        _stage(state, 64, 0, 1)
    assert durable.log.bytes == size
    durable.close()
    state = ShardState()
    ShardDirectory(state, tmp_path).close()
    assert len(state.steps.parts()) == 64


def test_a_part_counts_once_however_often_it_is_staged() -> None:
    """The last one holds, also for a tally made before."""
    state = ShardState()
    state.create(make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    for value in (1, 2):
        for _ in range(2):
            _stage(state, 0, 0, value)
            _stage(state, 0, 1, 1)
        assert _tally(state, 0, 2) == (value + 1) ** 2 * KEYS.size * 2
    assert _commit(state, 0, 2)
    assert _rows(state) == {-3.0}


def _routed(state: ShardState, version: int, owned: NDArray[np.bool_]) -> None:
    routing = routing_of(["a:1", "b:1"], np.where(owned, 0, 1).astype(np.uint16), version)
    with state.files.closed(), state.gate.closed():
        state.install(pb.RouteRequest(install=routing, index=0))


def test_buckets_that_are_on_their_way_wait_for_their_routing() -> None:
    """A commit by the routing that still holds makes no step of what has come already."""
    first = np.arange(_native.BUCKETS) < 512
    ours = first[_native.buckets_of(KEYS)]
    sender, state = ShardState(), ShardState()
    for each, owned in ((sender, ~first), (state, first)):
        each.create(make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
        _routed(each, 1, owned)
        chosen = KEYS[owned[_native.buckets_of(KEYS)]]
        head = pb.StageRequest(series="s", step=5)
        head.tables.add(table="t", dim=2, count=len(chosen))
        message = pack(head, chosen, np.full((len(chosen), 2), -1, np.float32))
        stage_part(each, part_of(message, each.buckets), route=1)
    (part,) = sender.steps.parts()
    for _ in range(2):  # the last round may be made again
        moved = np.flatnonzero(~first).tolist()
        series = [progress.message for progress in sender.steps.progress()]
        state.absorb(pb.StateBlock(moved=moved, series=series))
        state.absorb(pb.StateBlock(staged=True, payload=bytes(part.only(~first).message)))
    assert _commit(state, 5, 1, route=1)
    assert not _commit(state, 5, 1, route=1)
    rows = state.tables["t"].native.pull(KEYS, True)[:, 0]
    np.testing.assert_array_equal(rows, ours)
    _routed(state, 2, np.ones(_native.BUCKETS, bool))
    assert _commit(state, 5, 1, route=2)
    assert not _commit(state, 5, 1, route=2)
    assert _rows(state) == {1.0}
    assert not state.steps.parts()


def test_a_part_that_came_from_some_shards_alone_is_not_whole() -> None:
    """It was on its way to another when the buckets moved here; it must come again."""
    first = np.arange(_native.BUCKETS) < 512
    state = ShardState()
    state.create(make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    _routed(state, 1, first)
    head = pb.StageRequest(series="s", step=0)
    stage_part(state, part_of(pack(head), state.buckets), route=1)
    assert tally_step(state, pb.TallyRequest(series="s", slots=1, route=1)) == 0
    state.absorb(pb.StateBlock(moved=np.flatnonzero(~first).tolist()))
    _routed(state, 2, np.ones(_native.BUCKETS, bool))
    with pytest.raises(ConflictError, match=r"lacks the parts of slots \[0\]"):
        tally_step(state, pb.TallyRequest(series="s", slots=1, route=2))
    with pytest.raises(ConflictError, match=r"lacks the parts of slots \[0\]"):
        _commit(state, 0, 1, route=2)
    stage_part(state, part_of(pack(head), state.buckets), route=2)
    assert _commit(state, 0, 1, route=2)
