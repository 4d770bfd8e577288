"""Rows of several tables in one message to each shard."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, ParameterClient, ShardError
from ps.client import fetch as fetching
from ps.client import pull as pulling
from ps.client import pull_many as together
from ps.client.session import Shard
from ps.lines.calls import PULL
from ps.shm.line import UnixLine

TABLES = {"many.wide": 1, "many.deep": 8, "many.like": 8, "many.odd": 3}
KEYS = np.arange(300)
WAYS: dict[str, dict[str, Any]] = {
    "in place": {},
    "narrow": {"wire": "bfloat16"},
    "far": {"shared_memory": False},
    "far and narrow": {"shared_memory": False, "wire": "float16"},
}


@pytest.fixture(autouse=True, scope="module")
def _tables(shards: LocalShards) -> None:
    with ParameterClient(shards.addresses) as client:
        rng = np.random.default_rng(0)
        for name, dim in TABLES.items():
            client.create_table(name, dim)
            client.assign(name, KEYS, rng.standard_normal((len(KEYS), dim)).astype(np.float32))


def asked() -> dict[str, np.ndarray]:
    """Keys of each table, some twice, in shapes of their own."""
    rng = np.random.default_rng(1)
    return {
        "many.odd": rng.integers(0, 400, (7, 5)),
        "many.wide": rng.integers(0, 400, 50),
        "many.like": KEYS[100:],
        "many.deep": KEYS[:200],
    }


class Messages(list):
    """Which shard was sent which tables."""

    def note(self, to: str, request: bytes) -> None:
        head = pb.PullRequest.FromString(request)
        self.append((to, [head.table, *(other.table for other in head.others)]))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    found = Messages()
    send, data = UnixLine.send, Shard.data

    def noted_send(line: UnixLine, method: int, request: bytes, timeout: float) -> None:
        found.note(f"line {id(line)}", request)
        send(line, method, request, timeout)

    def noted_data(
        shard: Shard, number: int, request: bytes, what: str, line=None, *by: float
    ) -> bytes:
        if line is None:
            found.note(shard.address, request)
        return data(shard, number, request, what, line, *by)

    monkeypatch.setattr(UnixLine, "send", noted_send)
    monkeypatch.setattr(Shard, "data", noted_data)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read_only", [False, True])
def test_they_are_the_rows_of_each_table_alone(
    shards: LocalShards, messages: Messages, way: str, read_only: bool
) -> None:
    with ParameterClient(shards.addresses, **WAYS[way]) as client:
        expected = {name: client.pull(name, keys) for name, keys in asked().items()}
        messages.clear()
        found = client.pull_many(asked(), read_only)
    assert [*found] == [*asked()]
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows)
        assert found[name].dtype == np.float32
    assert len(messages) == len({to for to, _ in messages}) == 3
    assert all(tables == [*asked()] for _, tables in messages)


@pytest.mark.parametrize("way", WAYS)
def test_distinct_keys_and_tables_without_any(shards: LocalShards, way: str) -> None:
    with ParameterClient(shards.addresses, **WAYS[way]) as client:
        keys = {"many.deep": KEYS[50:90], "many.wide": KEYS[:0], "many.odd": KEYS[7:8]}
        found = client.pull_many(keys, distinct=True)
        for name, some in keys.items():
            np.testing.assert_array_equal(found[name], client.pull(name, some))
        assert found["many.wide"].shape == (0, 1)
        assert client.pull_many({}) == {}
        none = client.pull_many(dict.fromkeys(TABLES, KEYS[:0]))
        assert {name: rows.shape for name, rows in none.items()} == {
            name: (0, dim) for name, dim in TABLES.items()
        }


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_one_message_goes_by_itself(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(together, "MESSAGE_BYTES", 1000)
    monkeypatch.setattr(pulling, "MESSAGE_BYTES", 1000)
    with ParameterClient(shards.addresses, **WAYS[way]) as client:
        found = client.pull_many(asked())
        for name, keys in asked().items():
            np.testing.assert_array_equal(found[name], client.pull(name, keys))


def test_a_shard_that_is_gone_gives_no_rows_at_all() -> None:
    """And its clients go on once it is back."""
    both = {"a": KEYS, "b": KEYS}
    with LocalShards(2) as shards, ExitStack() as stack:

        def connected(timeout_s: float) -> list[ParameterClient]:
            ways = (WAYS["in place"], WAYS["far"])
            made = [ParameterClient(shards.addresses, timeout_s, **way) for way in ways]
            return [stack.enter_context(client) for client in made]

        clients = connected(timeout_s=30)
        for name in both:
            clients[0].create_table(name, 4, seed=ord(name))
        expected = clients[0].pull_many(both)
        clients[1].pull_many(both)
        impatient = connected(timeout_s=2)
        for client in impatient:
            for name in both:
                client.spec(name)
        os.kill(shards.processes[1].pid, signal.SIGKILL)
        shards.processes[1].process.wait()
        with ThreadPoolExecutor(2) as pool:
            failing = [pool.submit(client.pull_many, both) for client in impatient]
            assert [type(each.exception()) for each in failing] == [ShardError] * 2
        shards.restart(1)
        clients[0].create_table("a", 4, seed=ord("a"))
        clients[0].create_table("b", 4, seed=ord("b"))
        for client in clients:
            found = client.pull_many(both)
            for name, rows in expected.items():
                np.testing.assert_array_equal(found[name], rows)


def test_rows_are_found_where_they_have_gone() -> None:
    both = {"a": KEYS, "b": KEYS}
    with LocalShards(1) as shards, ExitStack() as stack:
        clients = [
            stack.enter_context(ParameterClient(shards.addresses, **way)) for way in WAYS.values()
        ]
        for name in both:
            clients[0].create_table(name, 4)
            rows = np.full((len(KEYS), 4), ord(name), np.float32)
            clients[0].assign(name, KEYS, rows)
        for client in clients:
            client.pull_many(both)
        with ParameterClient(shards.addresses) as other:
            assert other.reshard([*shards.addresses, shards.add()]) > 0
        for client in clients:
            found = client.pull_many(both)
            for name in both:
                assert (found[name] == ord(name)).all()


def test_tables_that_are_not_asked_for_alike_are_refused(shards: LocalShards) -> None:
    with ParameterClient(shards.addresses) as client:
        session = client.session()
        shard = session.shards[0]
        deep, wide = (
            fetching.Wanted(name, TABLES[name], KEYS[:2].astype(np.uint64), "float32", False)
            for name in ("many.deep", "many.wide")
        )

        def refused(**of_other: object) -> None:
            head, other = deep.head(session.routes, shard), wide.head(session.routes, shard)
            for field, value in of_other.items():
                setattr(other, field, value)
            with pytest.raises(ShardError, match=r"INVALID_ARGUMENT|NOT_FOUND"):
                shard.data(PULL, pack(fetching.joined([head, other]), deep.keys, wide.keys), "Pull")

        refused(prefetch=True)
        refused(region="another")
        refused(count=3)
        refused(dim=2)
        refused(table="none")
        refused(payload=b"12345678")
