"""A client that names other shards than a table was made with is told so, and changes nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos import parameter_server_pb2 as pb
from ps import LocalShards, LocalTable, ParameterClient, ShardError, TableError
from ps.errors import ConflictError
from ps.shard.directory import ShardDirectory
from ps.shard.replay import replay
from ps.shard.state import ShardState
from ps.shard.transfer import blocks_of, state_of
from ps.table.buckets import Share, default_route
from ps.table.spec import make_spec
from ps.table.table import Table

KEYS = np.arange(64)
ONES = np.ones((64, 2), np.float32)
OPTIONS = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
Named = Callable[[list[str]], list[str]]


@pytest.fixture(scope="module")
def three() -> Iterator[list[str]]:
    with LocalShards(3) as shards:
        yield shards.addresses


@pytest.fixture
def connect() -> Iterator[Callable[[list[str]], ParameterClient]]:
    clients: list[ParameterClient] = []

    def one(addresses: list[str], *, shared_memory: bool = True) -> ParameterClient:
        clients.append(ParameterClient(addresses, timeout_s=20, shared_memory=shared_memory))
        return clients[-1]

    yield one
    for client in clients:
        client.close()


def _counts(addresses: list[str]) -> list[tuple[int, int]]:
    """Of table t on each shard: keys pulled and pushed."""
    with ParameterClient(addresses, timeout_s=20) as client:
        found = [
            [(t.pulled, t.pushed) for t in s.tables if t.name == "named"] for s in client.stats()
        ]
    return [counts[0] if counts else (0, 0) for counts in found]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (2, lambda three: [three[1], three[0]]),
        (3, lambda three: three[:2]),
        (2, lambda three: three),
        (3, lambda three: [three[0], three[2], three[1]]),  # the first one is right
    ],
    ids=["two the other way round", "one less", "one more", "two of three"],
)
def test_nothing_is_read_or_written(
    three: list[str],
    connect: Callable[[list[str]], ParameterClient],
    tmp_path: Path,
    made: int,
    named: Named,
) -> None:
    right = connect(three[:made])
    right.create_table("named", 2, **OPTIONS)
    right.push("named", KEYS, -ONES)
    before = _counts(three)
    wrong = connect(named(three))
    calls: list[Callable[[], object]] = [
        lambda: wrong.pull("named", KEYS),
        lambda: wrong.push("named", KEYS, ONES),
        lambda: wrong.prefetch("named", KEYS).result(),
        lambda: wrong.stage_async("s", 1, 0, {"named": (KEYS, ONES)}).result(),
        lambda: wrong.commit_async("s", 1, 1, parts={"named": (KEYS, ONES)}).result(),
        lambda: wrong.create_table("named", 2, **OPTIONS),
        lambda: wrong.shrink("named"),
        lambda: wrong.keys("named"),
        lambda: wrong.reshard(three[1:3]),
    ]
    for call in calls:
        with pytest.raises(TableError, match=r"is shard \d of \d of it.*in their order"):
            call()
    with pytest.raises(ShardError, match="in their order"):
        wrong.save(tmp_path / "saved")
    assert _counts(three) == before
    assert (right.pull("named", KEYS) == 1).all()
    right.save(tmp_path / "saved")
    assert (LocalTable.load_checkpoint(tmp_path / "saved")["named"].pull(KEYS) == 1).all()
    right.drop_tables("named")


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_load_by_others_is_noticed(
    three: list[str],
    connect: Callable[..., ParameterClient],
    tmp_path: Path,
    shared_memory: bool,
) -> None:
    before = connect(three[:2], shared_memory=shared_memory)
    before.create_table("named", 2, **OPTIONS)
    before.push("named", KEYS, -ONES)
    before.save(tmp_path / "saved")
    others = connect([three[1], three[0]])
    others.load(tmp_path / "saved")
    calls: list[Callable[[], object]] = [
        lambda: before.pull("named", KEYS),
        lambda: before.push("named", KEYS, ONES),
        lambda: before.stage_async("s", 1, 0, {"named": (KEYS, ONES)}).result(),
        lambda: before.commit_async("s", 1, 1, parts={"named": (KEYS, ONES)}).result(),
    ]
    for call in calls:
        with pytest.raises(ShardError, match="in their order") as refused:
            call()
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (others.pull("named", KEYS) == 1).all()
    others.push("named", KEYS, -ONES)
    assert (others.pull("named", KEYS) == 2).all()
    others.drop_tables("named")


def _spec(durability: str) -> pb.TableSpec:
    spec = make_spec("t", 2, durability=durability, optimizer="sgd")
    spec.share = Share(1, 2).number
    return spec


@pytest.mark.parametrize("folds", [0, 1, 2])
def test_a_restarted_shard_knows(tmp_path: Path, folds: int) -> None:
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    assert state.create(_spec("log"))
    for _ in range(folds):
        durable.fold()
    durable.close()
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    assert state.tables["t"].share == Share(1, 2)
    assert not state.create(_spec("log"))
    other = _spec("log")
    other.share = Share(0, 2).number
    with pytest.raises(ConflictError, match="this is shard 1 of 2"):
        state.create(other)
    durable.close()


def test_a_replica_knows() -> None:
    state = ShardState()
    record = pb.LogRecord(kind="create", time_s=1)
    replay(state, record, memoryview(_spec("replica").SerializeToString()))
    assert state.tables["t"].share == Share(1, 2)
    snapshot = state.tables["t"].native.snapshot(since=0, values=False, min_score=0, buckets=None)
    tables, _ = state_of(blocks_of(state.tables, {"t": snapshot}), "")
    assert tables["t"].share == Share(1, 2)


def test_what_no_share_can_be_is_none() -> None:
    assert Share.of(0) is None
    assert Share.of(7) is None
    for share in (Share(0, 1), Share(3, 4), Share(1023, 1024)):
        assert Share.of(share.number) == share
        assert (share.buckets() == (default_route(share.shards) == share.shard)).all()
    for number in (1 << 40, Share(2, 2).number, Share(0, 1025).number, (1 << 64) - 1):
        with pytest.raises(TableError, match="expected"):
            Table.make(pb.TableSpec(name="t", dim=1, share=number))
