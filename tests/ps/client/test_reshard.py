"""Another number of shards while training goes on."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chassis.channels import connect
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, LocalTable, ParameterClient, ShardError, read_checkpoint
from ps.client import reshard
from ps.table.rules import Eviction
from tests.keys import keys_of_one_subtable
from tests.rounds import more
from tests.waiting import wait_until

KEYS = np.arange(4000)


def _make(client: ParameterClient, durability: str = "none") -> None:
    client.create_table(
        "t",
        2,
        optimizer="sgd",
        learning_rate=1.0,
        initializer="zeros",
        durability=durability,
    )


class Counter(threading.Thread):
    """Adds 1 to random keys, again and again, and counts what was acknowledged."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(addresses, timeout_s=60)
        self.counts = np.zeros(len(KEYS), np.int64)
        self.pushes = 0
        self.error: BaseException | None = None
        self._rng = np.random.default_rng(seed)
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                keys = self._rng.choice(KEYS, 200, replace=False)
                self.client.push("t", keys, np.full((200, 2), -1, np.float32))
                self.counts[keys] += 1
                self.pushes += 1
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self.join(90)
        self.client.close()
        assert not self.is_alive()
        assert self.error is None, self.error


@contextmanager
def counting(addresses: list[str], clients: int = 2) -> Iterator[list[Counter]]:
    counters = [Counter(addresses, seed) for seed in range(clients)]
    for counter in counters:
        counter.start()
    try:
        yield counters
    finally:
        for counter in counters:
            counter.end()


def _more(counters: list[Counter], pushes: int = 5) -> None:
    """Wait until every one of them has got so much further."""
    goals = [c.pushes + pushes for c in counters]
    wait_until(
        lambda: all(c.pushes >= goal for c, goal in zip(counters, goals, strict=True)),
        lambda: [c.error for c in counters],
        60.0,
        pause_s=0.01,
    )


def _same(client: ParameterClient, counters: list[Counter]) -> None:
    total = sum(c.counts for c in counters)
    rows = client.pull("t", KEYS)
    np.testing.assert_array_equal(rows[:, 0], total)
    np.testing.assert_array_equal(rows[:, 1], total)


@pytest.mark.parametrize("durability", ["log", *more("none")])
def test_two_three_one_four_while_pushes_run(tmp_path: Path, durability: str) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client, durability)
        bystander = ParameterClient(shards.addresses, timeout_s=30)
        with counting(shards.addresses) as counters:
            _more(counters)
            a, b = shards.addresses
            c = shards.add()
            assert client.reshard([a, b, c]) > 0
            assert client.addresses == [a, b, c]
            _more(counters)
            client.save(tmp_path / "three")
            client.reshard([c])
            _more(counters)
            d = shards.add()
            client.reshard([c, a, d, b])  # two come back
            _more(counters)
            client.create_table("later", 3)
            client.save(tmp_path / "four")
        _same(client, counters)
        _same(bystander, counters)  # it has not been told of anything
        assert bystander.addresses == [c, a, d, b]
        assert not bystander.create_table("later", 3)
        held = [next(t.rows for t in s.tables if t.name == "t") for s in client.stats()]
        assert sum(held) == len(KEYS)
        assert min(held) > len(KEYS) / 8
        if durability == "log":  # what has moved is the new owner's to keep
            for index in range(4):
                shards.processes[index].process.kill()
                shards.restart(index)
            _same(bystander, counters)
        before = client.pull("t", KEYS)
        client.load(tmp_path / "four")
        assert (client.pull("t", KEYS) <= before).all()
        four = LocalTable.load_checkpoint(tmp_path / "four")["t"]
        np.testing.assert_array_equal(client.pull("t", KEYS), four.pull(KEYS))
        bystander.close()
    with LocalShards(2) as others, ParameterClient(others.addresses) as client:
        client.load(tmp_path / "four")
        np.testing.assert_array_equal(client.pull("t", KEYS), four.pull(KEYS))
        three = LocalTable.load_checkpoint(tmp_path / "three")["t"]
        assert (three.pull(KEYS) <= four.pull(KEYS)).all()


def test_a_target_that_dies_leaves_all_as_it_was() -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=3) as client:
        _make(client)
        a, b = shards.addresses
        c = shards.add()
        with counting([a, b]) as counters:
            _more(counters)
            shards.processes[2].process.kill()
            with pytest.raises(ShardError):
                client.reshard([a, b, c], timeout_s=5)
            _more(counters)
            shards.restart(2)
            client.reshard([a, b, c])
            _more(counters)
        _same(client, counters)
        assert all(t.rows for s in client.stats() for t in s.tables if t.name == "t")


_COORDINATOR = """
import os, sys
from ps import ParameterClient
from ps.client.session import Shard

calls, stop = 0, int(sys.argv[1])
real = Shard.call

def call(self, method, request, what, *rest):
    global calls
    if what.startswith("Move") or (what == "Route" and request.HasField("install")):
        if calls == stop:
            os.kill(os.getpid(), 9)
        calls += 1
    return real(self, method, request, what, *rest)

Shard.call = call
old = sys.argv[2].split(",")
client = ParameterClient(old, timeout_s=20)
client.reshard(sys.argv[3].split(","))
print("done", calls)
"""


@pytest.mark.parametrize("steps", [(1, 5, 7, 99), *more((1, 5, 5, 9, 6, 7, 8, 99))], ids=len)
def test_an_interrupted_reshard_can_be_repeated(steps: tuple[int, ...]) -> None:
    """The coordinator is killed before its n-th step; another one finishes."""
    with LocalShards(2) as shards:
        a, b = shards.addresses
        c = shards.add()
        sets = [[a, b], [a, b, c], [c], [a, b]]
        with ParameterClient([a, b], timeout_s=30) as client:
            _make(client)
        with counting([a, b]) as counters:
            # Before the first routing; while rows are sent; around each shard's letting go; never.
            for at, step in enumerate(steps):
                old, new = sets[at % 3], sets[at % 3 + 1]
                run = subprocess.run(
                    [sys.executable, "-c", _COORDINATOR, str(step), ",".join(old), ",".join(new)],
                    capture_output=True, text=True, timeout=60, check=False,
                )  # fmt: skip
                assert run.returncode == (0 if step == 99 else -9), run.stderr
                with ParameterClient(old, timeout_s=30) as another:
                    another.reshard(new)
                _more(counters, 2)
        with ParameterClient([a, b], timeout_s=30) as client:
            _same(client, counters)


def test_a_routing_that_takes_buckets_away_needs_their_rows_sent() -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=5) as client:
        _make(client)
        client.push("t", KEYS, np.full((len(KEYS), 2), -1, np.float32))
        a, b = shards.addresses
        client.reshard([a, b])  # an even split is no change, but from now on it is known
        shard = client.session().connect([a])[0]
        routing = pb.Routing(version=9, shards=[a, b], bucket=[1] * 1024)
        request = pb.RouteRequest(install=routing, index=0)
        with pytest.raises(ShardError, match="rows have not been sent"):
            shard.call(shard.stub.Route, request, "Route")
        assert (client.pull("t", KEYS) == 1).all()


def test_a_push_is_known_where_its_rows_have_gone(tmp_path: Path) -> None:
    """Sent again by the new routing it changes nothing; and no save waits for it."""
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        head = pb.PushRequest(table="t", dim=2, count=1, client="me", epoch=1, sequence=1)
        gradient = np.full((1, 2), -1, np.float32)

        def push(address: str) -> bool:
            with connect(address) as channel:
                call = channel.unary_unary("/heterps.v1.ParameterServer/Push")
                request = pack(head, np.uint64([5]), gradient)
                return pb.PushReply.FromString(call(request, timeout=10)).applied

        assert push(shards.addresses[0])
        client.push("t", KEYS, np.full((len(KEYS), 2), -1, np.float32))
        client.reshard([shards.add()])
        new = client.session().connect(client.addresses)[0]
        reply: pb.RouteReply = new.call(new.stub.Route, pb.RouteRequest(), "Route")
        head.route = reply.routing.version
        assert not push(client.addresses[0])
        assert (client.pull("t", [5]) == 2).all()
        client.push("t", KEYS, np.full((len(KEYS), 2), -1, np.float32))
        client.save(tmp_path / "ck")
    assert read_checkpoint(tmp_path / "ck").torn == 0


def test_more_rows_go_while_buckets_move_than_a_shard_can_name() -> None:
    """They are sent whole again: none that has gone is left behind."""
    with LocalShards(2) as shards, ParameterClient(shards.addresses[:1], timeout_s=30) as client:
        client.create_table("t", 1, optimizer="sgd", eviction=Eviction(ttl_steps=1))
        keys = keys_of_one_subtable(70_000)
        client.push("t", keys, np.ones((len(keys), 1), np.float32), step=1)
        a, b = client.session().connect(shards.addresses)
        move = pb.MoveRequest(to=b.address, token="me", buckets=[0], route=1, hold_s=10)
        moved: pb.MoveReply = a.call(a.stub.Move, move, "Move")
        assert moved.rows == len(keys)
        assert client.shrink("t", step=10) == len(keys)
        client.push("t", keys[:5], np.ones((5, 1), np.float32), step=10)
        move.again = True
        moved = a.call(a.stub.Move, move, "Move")
        assert moved.rows == 5
        stats: pb.StatsReply = b.call(b.stub.Stats, pb.StatsRequest(), "Stats")
        assert [(table.name, table.rows) for table in stats.tables] == [("t", 5)]


@contextmanager
def _between_split_and_send(client: ParameterClient, act: Callable[[], None]) -> Iterator[None]:
    """Have something happen once a push has been split by shard and is not yet sent."""
    session = client.session()
    numbered = session.sequences

    def numbers(count: int) -> int:
        act()
        session.update_routes()
        client.pull("t", KEYS)  # makes memory for the new shards, and gives it back
        return numbered(count)

    session.sequences = numbers  # type: ignore[method-assign]
    yield
    session.sequences = numbered  # type: ignore[method-assign]


def test_a_load_between_two_rounds_moves_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        LocalShards(2) as shards,
        ParameterClient(shards.addresses[:1], timeout_s=30) as client,
        ParameterClient(shards.addresses[:1], timeout_s=30) as other,
    ):
        _make(client)
        for value in (1, 2):
            client.assign("t", KEYS, np.full((len(KEYS), 2), value, np.float32))
            if value == 1:
                client.save(tmp_path / "ck")
        real = reshard._move

        def move(*given: Any, **named: Any) -> int:
            rows = real(*given, **named)
            monkeypatch.setattr(reshard, "_move", real)
            other.load(tmp_path / "ck")
            return rows

        monkeypatch.setattr(reshard, "_move", move)
        client.reshard(shards.addresses)
        assert (client.pull("t", KEYS) == 1).all()


def test_a_push_that_was_split_before_its_shard_left_goes_where_its_rows_are() -> None:
    """Memory is shared with the shards of the new routing by then, and not with that one."""
    with (
        LocalShards(3) as shards,
        ParameterClient(shards.addresses[:2]) as client,
        ParameterClient(shards.addresses[:2]) as coordinator,
    ):
        _make(client)
        ones = np.full((len(KEYS), 2), -1, np.float32)
        for kept in (shards.addresses[1:], shards.addresses[:1], shards.addresses):
            with _between_split_and_send(client, partial(coordinator.reshard, kept)):
                client.push("t", KEYS, ones)
            assert client.addresses == list(kept)
        assert (client.pull("t", KEYS) == 3).all()
