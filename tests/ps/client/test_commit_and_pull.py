"""A pull that goes along with the commit it waits for: rows are as of one after the other."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import pack, payload_prefix, unpack
from ps import LocalShards, ParameterClient, ShardError
from ps.client.pull_many import PullMany
from ps.errors import TableError
from ps.server.data_plane import DataPlane
from ps.shard.state import ShardState
from ps.shm.region import Region
from ps.table.spec import make_spec

KEYS = np.arange(-2000, 2000)
SERIES = "job.series"
TABLES = ("job.a", "job.b")


@pytest.fixture(scope="module", params=[1, 3])
def shards(request: pytest.FixtureRequest) -> Iterator[LocalShards]:
    with LocalShards(request.param) as started:
        yield started


@pytest.fixture
def client(shards: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(shards.addresses, timeout_s=20) as connected:
        _make(connected)
        yield connected
        connected.drop_tables("job.")


def _make(client: ParameterClient, durability: str = "none") -> None:
    for dim, table in enumerate(TABLES, start=1):
        client.create_table(
            *(table, dim), optimizer="sgd", learning_rate=1.0, initializer="zeros",
            durability=durability,
        )  # fmt: skip


def _part(step: int) -> dict[str, tuple[Any, Any]]:
    """Half of the keys, of each table others."""
    made = {}
    for number, table in enumerate(TABLES):
        keys = np.roll(KEYS, 7 * step + 11 * number)[: len(KEYS) // 2]
        grads = (keys[:, None] + np.arange(1 + number) + step).astype(np.float32)
        made[table] = (keys, grads)
    return made


class Expected:
    """What rows are after some steps."""

    def __init__(self) -> None:
        self.rows = [np.zeros((len(KEYS), dim), np.float32) for dim in (1, 2)]

    def step(self, part: dict[str, tuple[Any, Any]]) -> None:
        for rows, (keys, grads) in zip(self.rows, part.values(), strict=True):
            rows[keys - KEYS[0]] -= grads

    def check(
        self, found: list[NDArray[np.float32]], keys: NDArray[np.int64], off: float = 0.0
    ) -> None:
        for rows, own in zip(self.rows, found, strict=True):
            np.testing.assert_allclose(own, rows[keys - KEYS[0]], rtol=off)


def _asked(client: ParameterClient, keys: NDArray[np.int64]) -> PullMany:
    asked = client.ask_many(dict.fromkeys(TABLES, keys), distinct=True)
    asked.prepare()
    return asked


def test_rows_that_come_along_have_seen_the_step_and_no_other(client: ParameterClient) -> None:
    expected, memory = Expected(), client.session().memory()
    assert memory is not None
    for step in range(12):
        keys = np.roll(KEYS, step)[: 10 + 300 * step]
        asked, part = _asked(client, keys), _part(step)
        client.commit_async(
            SERIES, step, 1, parts=part, distinct=True, along=asked, here=step % 2 == 0
        ).result(20)
        assert asked.ready is not None
        assert asked.ready._came
        expected.step(part)
        later = _part(step)  # what is pushed since is not what came
        for table, (some, grads) in later.items():
            client.push(table, some, grads)
        expected.check(asked.run(), keys)
        expected.step(later)
    assert len(memory._attached) <= 4


def test_it_goes_along_with_the_commit_of_staged_parts(client: ParameterClient) -> None:
    parts, expected = [_part(step) for step in range(2)], Expected()
    for slot, part in enumerate(parts):
        client.stage_async(SERIES, 0, slot, part).result(20)
        expected.step(part)
    asked = _asked(client, KEYS)
    client.commit_async(SERIES, 0, 2, along=asked).result(20)
    assert asked.ready is not None
    assert asked.ready._came
    expected.check(asked.run(), KEYS)


def test_one_that_no_commit_took_along_is_sent_by_itself(client: ParameterClient) -> None:
    asked, part, expected = _asked(client, KEYS), _part(0), Expected()
    client.commit_async(SERIES, 0, 1, parts=part).result(20)
    expected.step(part)
    expected.check(asked.run(), KEYS)


def test_one_that_is_given_up_keeps_no_memory(client: ParameterClient) -> None:
    memory = client.session().memory()
    assert memory is not None
    for step in range(8):
        asked = _asked(client, KEYS)
        client.commit_async(SERIES, step, 1, parts=_part(step), along=asked).result(20)
        asked.give_up()
        asked.give_up()
    assert len(memory._attached) <= 3  # a message to each shard


@pytest.mark.parametrize("options", [{"shared_memory": False}, {"wire": "bfloat16"}])
def test_where_it_cannot_go_along_it_is_pulled_afterwards(
    shards: LocalShards, client: ParameterClient, options: dict[str, Any]
) -> None:
    with ParameterClient(shards.addresses, timeout_s=20, **options) as other:
        asked, part, expected = _asked(other, KEYS), _part(0), Expected()
        other.commit_async(SERIES, 0, 1, parts=part, along=asked).result(20)
        expected.step(part)
        assert asked.ready is None
        expected.check(asked.run(), KEYS, 0.01 if "wire" in options else 0.0)


def test_without_keys_there_is_nothing_to_go_along(client: ParameterClient) -> None:
    asked = _asked(client, KEYS[:0])
    client.commit_async(SERIES, 0, 1, parts=_part(0), along=asked).result(20)
    assert [rows.shape for rows in asked.run()] == [(0, 1), (0, 2)]


def test_a_commit_that_fails_brings_no_rows(client: ParameterClient) -> None:
    client.commit_async(SERIES, 3, 1, parts=_part(3)).result(20)
    asked = _asked(client, KEYS)
    failing = client.commit_async(SERIES, 2, 1, parts=_part(2), along=asked)
    with pytest.raises(ShardError, match="dropped, or a later one"):
        failing.result(20)
    assert asked.ready is not None
    assert not asked.ready._came
    asked.give_up()


@pytest.mark.parametrize("when", ["prepared", "committed"])
def test_a_shard_is_killed_and_the_step_is_applied_once(when: str, tmp_path: Any) -> None:
    with (
        LocalShards(2, directory=tmp_path) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as client,
    ):
        _make(client, "log")
        expected = Expected()
        for step in range(3):
            asked, part = _asked(client, KEYS), _part(step)
            if when == "prepared":
                os.kill(shards.processes[step % 2].pid, signal.SIGKILL)
                shards.restart(step % 2)
            client.commit_async(SERIES, step, 1, parts=part, along=asked).result(60)
            if when == "committed":
                os.kill(shards.processes[step % 2].pid, signal.SIGKILL)
                shards.restart(step % 2)
                client.commit_async(SERIES, step, 1, parts=part).result(60)
            expected.step(part)
            expected.check(asked.run(), KEYS)
            expected.check([*client.pull_many(dict.fromkeys(TABLES, KEYS)).values()], KEYS)


def test_buckets_that_have_moved_since_are_pulled_where_they_are(tmp_path: Any) -> None:
    with LocalShards(3) as shards:
        few = shards.addresses[:2]
        with ParameterClient(few, timeout_s=60) as client, ParameterClient(few) as other:
            _make(client)
            expected = Expected()
            for step, addresses in enumerate([shards.addresses, few]):
                asked, part = _asked(client, KEYS), _part(step)
                other.reshard(addresses)
                client.commit_async(SERIES, step, 1, parts=part, along=asked).result(60)
                expected.step(part)
                expected.check(asked.run(), KEYS)


def _shard() -> tuple[DataPlane, Region]:
    state, region = ShardState(), Region(1 << 16)
    state.create(make_spec("job.a", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    plane = DataPlane(state)
    assert plane.regions.attach(region.name, region.file)
    return plane, region


def _commit(then: pb.PullRequest) -> bytes:
    keys, grads = np.arange(4, dtype=np.uint64), np.full((4, 1), -2.0, np.float32)
    head = pb.CommitRequest(series=SERIES, step=0, slots=1, scale=1.0, rate=1.0, then=then)
    head.part.tables.add(table="job.a", dim=1, count=4)
    return pack(head, keys, grads)


def test_a_message_that_comes_again_is_applied_once_and_pulled_again() -> None:
    plane, region = _shard()
    region.view(0, 32)[:] = np.arange(4, dtype=np.uint64).view(np.uint8).data
    then = pb.PullRequest(table="job.a", dim=1, count=4, region=region.name, rows_at=64)
    for applied in (True, False, False):
        region.view(64, 16)[:] = bytes(16)
        reply, now = plane.commit(_commit(then))
        assert now == applied
        assert pb.CommitReply.FromString(reply) == pb.CommitReply(applied=applied, pulled=True)
        assert np.frombuffer(region.view(64, 16), np.float32).tolist() == [2.0] * 4


@pytest.mark.parametrize("wrong", ["table", "dim", "region", "rows_at", "route"])
def test_a_step_is_over_though_what_follows_it_cannot_be_pulled(wrong: str) -> None:
    plane, region = _shard()
    then = pb.PullRequest(table="job.a", dim=1, count=4, region=region.name, rows_at=64)
    odd = {"table": "job.b", "dim": 2, "region": "another", "rows_at": 1 << 20, "route": 9}
    setattr(then, wrong, odd[wrong])
    reply, applied = plane.commit(_commit(then))
    assert applied
    assert pb.CommitReply.FromString(reply) == pb.CommitReply(applied=True)


def test_what_follows_a_step_without_a_region_is_refused_and_nothing_applied() -> None:
    plane, _ = _shard()
    with pytest.raises(TableError, match="region"):
        plane.commit(_commit(pb.PullRequest(table="job.a", dim=1, count=4)))
    assert len(plane._state.tables["job.a"].native.keys(10)) == 0


def test_journals_do_not_learn_what_follows() -> None:
    plane, region = _shard()
    told: list[bytes] = []
    plane._state.journal_step = lambda kind, message, *_: told.append(bytes(message))  # type: ignore[method-assign,assignment]
    then = pb.PullRequest(table="job.a", dim=1, count=4, region=region.name, rows_at=64)
    message = _commit(then)
    plane.commit(message)
    head, payload = unpack(pb.CommitRequest, told[0])
    assert not head.HasField("then")
    assert payload == unpack(pb.CommitRequest, message)[1]
    assert len(told[0]) < len(message)
    assert payload_prefix(head, len(payload)) + bytes(payload) == told[0]
