"""Steps of many workers while shards and clients are killed, and buckets move: each once, whole."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from chassis.channels import connect
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import (
    Admission,
    CheckpointError,
    Eviction,
    LocalShards,
    LocalTable,
    ParameterClient,
    Score,
    ShardError,
)
from ps.engine import _native as native
from tests.ps.counted import CountedTable
from tests.ps.faults.test_chaos import bad_network, filled
from tests.rounds import more, rounds
from tests.waiting import wait_until

KEYS = np.arange(3000, dtype=np.uint64)
DIM = 2
SLOTS = 3
SERIES = "job.stage"
COUNTED = "job.counted"


def _counted() -> CountedTable:
    """Its rules meet often, and halves are exact."""
    return CountedTable(
        1.0,
        lambda key: np.zeros(DIM, np.float32),
        Eviction(ttl_steps=4, min_score=1.0, every_steps=3),
        Score(non_click=0.5, click=2.0, decay=0.5),
        Admission(kind="score", threshold=1.5),
    )


def _make(client: ParameterClient, durability: str) -> None:
    for table in ("job.a", "job.b"):
        client.create_table(
            table,
            DIM,
            optimizer="sgd",
            learning_rate=1.0,
            initializer="zeros",
            durability=durability,
        )
    client.create_table(
        COUNTED, DIM, initializer="zeros", durability=durability, **_counted().options()
    )


class Group(threading.Thread):
    """Workers that make steps, each with a client of its own; knows what the rows must be.

    Every fourth step is dropped. Whoever tallies is not always who commits. Rows of one table come
    and go, by shows and clicks and by age, at every third step, be it dropped.
    """

    def __init__(
        self, addresses: list[str], timeout_s: float = 60, *, shared_memory: bool = True
    ) -> None:
        super().__init__(daemon=True)
        self.clients = [
            ParameterClient(
                addresses, timeout_s=timeout_s, shared_memory=shared_memory and slot % 2 == 0
            )
            for slot in range(SLOTS)
        ]
        self.sums = {table: np.zeros((len(KEYS), DIM)) for table in ("job.a", "job.b")}
        self.counted = _counted()
        self.steps = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._rng = np.random.default_rng(4)

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        """One step: parts, tally, verdict."""
        step, rng = self.steps, self._rng
        total = {table: np.zeros((len(KEYS), DIM)) for table in self.sums}
        staging = []
        gradients: dict[int, NDArray[np.float32]] = {}
        usage: dict[int, tuple[float, float]] = {}
        for slot, client in enumerate(self.clients):
            parts = {}
            for table in self.sums:
                keys = rng.choice(KEYS, 200, replace=False)
                grads = rng.integers(-3, 4, (200, DIM)).astype(np.float32)
                parts[table] = (keys, grads)
                total[table][keys] += grads
            own = rng.choice(KEYS, 300, replace=False)
            grads = rng.integers(-3, 4, (300, DIM)).astype(np.float32)
            shows = rng.integers(1, 4, 300).astype(np.float32)
            clicks = shows * rng.integers(0, 2, 300).astype(np.float32)
            for key, grad, s, c in zip(own.tolist(), grads, shows, clicks, strict=True):
                gradients[key] = gradients.get(key, 0) + np.float32(0.5) * grad
                had = usage.get(key, (0.0, 0.0))
                usage[key] = (had[0] + float(s), had[1] + float(c))
            parts[COUNTED] = (own, grads, np.stack([shows, clicks]))
            staging.append(client.stage_async(SERIES, step, slot, parts))
        for future in staging:
            future.result(90)
        leader = self.clients[step % SLOTS]
        shrink = [COUNTED] if step % 3 == 2 else []
        if step % 4 == 3:
            leader.discard_async(SERIES, step, shrink=shrink).result(90)
        else:
            if step % 2:
                found = leader.tally(SERIES, step, SLOTS)
                assert found.finite
                squares = sum((t * t).sum() for t in total.values())
                squares += sum(4 * (g * g).sum() for g in gradients.values())
                assert found.squared_norm == squares, step
            leader.commit_async(SERIES, step, SLOTS, scale=0.5, shrink=shrink).result(90)
            for table, grads in total.items():
                self.sums[table] -= 0.5 * grads
            self.counted.push(step, gradients, usage)
        self.counted.end_step(step)
        self.steps += 1

    def check(self) -> None:
        """The tables have what the committed steps have added, each once."""
        for table, sums in self.sums.items():
            np.testing.assert_array_equal(self.clients[0].pull(table, KEYS), sums)
        expected = np.zeros((len(KEYS), DIM), np.float32)
        for key, row in self.counted.rows.items():
            expected[key] = row
        client = self.clients[0]
        assert sorted(client.keys(COUNTED, 1 << 20).tolist()) == sorted(self.counted.rows)
        np.testing.assert_array_equal(client.pull(COUNTED, KEYS), expected)
        waiting = (t.waiting for s in client.stats() for t in s.tables if t.name == COUNTED)
        assert sum(waiting) == self.counted.waiting

    def close(self) -> None:
        for client in self.clients:
            client.close()


@contextmanager
def stepping(addresses: list[str]) -> Iterator[Group]:
    group = Group(addresses)
    group.start()
    try:
        yield group
    finally:
        group.ended.set()
        group.join(120)
        assert not group.is_alive()
    assert group.error is None, group.error
    group.check()
    group.close()


def _more(group: Group, steps: int = 3) -> None:
    goal = group.steps + steps
    wait_until(
        lambda: group.steps >= goal or group.error is not None,
        lambda: f"{group.steps} steps of {goal}, {group.error}",
        90.0,
        pause_s=0.01,
    )
    assert group.error is None, group.error


@pytest.mark.parametrize("durability", ["log", *more("none")])
def test_buckets_move_while_steps_are_made(tmp_path: Path, durability: str) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client, durability)
        a, b = shards.addresses
        with stepping([a, b]) as group:
            c = shards.add()
            for wanted in ([a, b, c], [c], [c, a, b], [a, b]):
                _more(group, 1)
                client.reshard(wanted)
            client.save(tmp_path / "ck")
            _more(group)
        assert all(s.staged_bytes == 0 for s in client.stats())


def test_buckets_move_between_part_and_commit() -> None:
    """Parts go along with their buckets; a step that one shard has made is not made again."""
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client, "none")
        a, b = shards.addresses
        c = shards.add()
        grads = np.ones((len(KEYS), DIM), np.float32)
        part = dict.fromkeys(("job.a", "job.b"), (KEYS, grads))
        for slot in range(2):
            client.stage_async(SERIES, 0, slot, part).result(30)
        client.reshard([c, b])
        assert client.tally(SERIES, 0, 2).squared_norm == 2 * 4 * grads.size
        client.reshard([b])
        client.commit_async(SERIES, 0, 2).result(30)
        with ParameterClient([a, b], timeout_s=30) as late:  # by a routing that holds no more
            late.stage_async(SERIES, 0, 1, part).result(30)
            late.commit_async(SERIES, 0, 2).result(30)
        client.reshard([a, b, c])
        client.commit_async(SERIES, 0, 2).result(30)
        for table in part:
            assert (client.pull(table, KEYS) == -2).all()


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("wanted", ["a", *more("b", "c", "abc")])
def test_buckets_move_in_the_middle_of_a_commit(wanted: str, carried: bool) -> None:
    """One shard has made the step, the other has not: rows go both ways, and none misses it."""
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client, "none")
        a, b = shards.addresses
        by_name = {"a": a, "b": b, "c": shards.add()}
        ones = np.ones((len(KEYS), DIM), np.float32)
        part = {"job.a": (KEYS, ones), "job.b": (KEYS[:100], ones[:100])}
        head = pb.CommitRequest(series=SERIES, step=0, slots=1, scale=1.0, rate=1.0)
        payload = []
        if carried:
            for table, (keys, grads) in part.items():
                mine = native.buckets_of(keys) < native.BUCKETS // 2
                head.part.tables.add(table=table, dim=DIM, count=int(mine.sum()))
                payload += [keys[mine], grads[mine]]
        else:
            client.stage_async(SERIES, 0, 0, part).result(30)
        with connect(a) as channel:
            commit = channel.unary_unary("/heterps.v1.ParameterServer/Commit")
            assert pb.CommitReply.FromString(commit(pack(head, *payload), timeout=10)).applied
        assert (client.pull("job.a", KEYS) == 0).any()
        client.reshard([by_name[name] for name in wanted])
        client.commit_async(SERIES, 0, 1, parts=part if carried else None).result(30)
        client.commit_async(SERIES, 0, 1, parts=part if carried else None).result(30)
        assert (client.pull("job.a", KEYS) == -1).all()
        assert (client.pull("job.b", KEYS[:100]) == -1).all()
        assert (client.pull("job.b", KEYS[100:]) == 0).all()


@rounds("kills", few=2, many=12)
def test_shards_with_a_log_are_killed_between_parts_and_commits(tmp_path: Path, kills: int) -> None:
    """At rest, during saves, while buckets move."""
    chance = random.Random(11)
    options = ("--fold", "1")
    with (
        LocalShards(2, supervised=True, options=options) as shards,
        ParameterClient(shards.addresses, timeout_s=20) as client,
    ):
        _make(client, "log")
        a, b = shards.addresses
        c = shards.add()
        wanted = [[a, b, c], [a, b]]
        with stepping([a, b]) as group:
            for number in range(kills):
                _more(group, 2)
                victim = shards.processes[chance.randrange(3)].pid
                timer = threading.Timer(chance.uniform(0, 0.1), os.kill, (victim, signal.SIGKILL))
                timer.start()
                with suppress(ShardError, CheckpointError):  # it says so, and can be repeated
                    if number % 3 == 1:
                        client.save(tmp_path / "ck", timeout_s=20)
                    elif number % 3 == 2:
                        client.reshard(wanted[number // 3 % 2], timeout_s=20)
                timer.join()
                _more(group, 1)
            for _ in range(5):
                with suppress(ShardError):
                    client.reshard([a, b, c], timeout_s=20)
                    break
            _more(group)


@rounds("kills", few=1, many=8)
def test_shards_with_a_replica_are_killed_between_parts_and_commits(kills: int) -> None:
    chance = random.Random(12)
    with (
        LocalShards(2, replicas=True, supervised=True) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as client,
    ):
        _make(client, "replica")
        with stepping(shards.addresses) as group:
            for number in range(kills):
                _more(group, 2)
                filled(shards)  # one of a pair may die at a time
                pair = shards.replicas if number % 2 else shards.processes
                victim = pair[chance.randrange(2)]
                os.kill(victim.pid, signal.SIGKILL)
                victim.process.wait()
                wait_until(
                    lambda: all(c.poll() is None for c in (*shards.processes, *shards.replicas)),
                    "all run again",
                    60.0,
                )
            _more(group)
            filled(shards)


def test_a_replica_that_was_restarted_has_the_parts() -> None:
    with (
        LocalShards(1, replicas=True) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as client,
    ):
        _make(client, "replica")
        ones = {"job.a": (KEYS, np.ones((len(KEYS), DIM), np.float32))}
        client.commit_async(SERIES, 0, 1, parts=ones).result(30)
        client.stage_async(SERIES, 1, 0, ones).result(30)
        shards.replicas[0].process.kill()
        shards.restart_replica(0)
        filled(shards)
        _restart(shards, 0)
        client.commit_async(SERIES, 0, 1, parts=ones).result(30)  # over
        client.commit_async(SERIES, 1, 1).result(30)
        assert (client.pull("job.a", KEYS) == -2).all()


def _restart(shards: LocalShards, index: int) -> None:
    shards.processes[index].process.kill()
    shards.restart(index)


@pytest.mark.parametrize("durability", ["log", "replica"])
def test_a_shard_is_killed_on_each_side_of_a_commit(tmp_path: Path, durability: str) -> None:
    """Between parts, between parts and tally, between tally and commit, after the commit."""
    with LocalShards(2, replicas=durability == "replica", directory=tmp_path / "ck") as shards:
        group = Group(shards.addresses, timeout_s=30)
        client = group.clients[0]
        _make(client, durability)
        ones = {"job.a": (KEYS, np.ones((len(KEYS), DIM), np.float32))}
        steps: list[str] = ["part", "tally", "commit", "again", "next"]
        for step, when in enumerate(steps):
            client.stage_async(SERIES, step, 0, ones).result(30)
            if when == "part":
                _restart(shards, 0)
            client.stage_async(SERIES, step, 1, ones).result(30)
            if when == "tally":
                _restart(shards, 1)
            assert client.tally(SERIES, step, 2).squared_norm == 4 * len(KEYS) * DIM
            if when == "commit":
                _restart(shards, 0)
            client.commit_async(SERIES, step, 2).result(30)
            if when == "again":
                _restart(shards, 1)
                client.stage_async(SERIES, step, 1, ones).result(30)
                client.commit_async(SERIES, step, 2).result(30)
            assert (client.pull("job.a", KEYS) == -2 * (step + 1)).all(), when
        assert all(s.staged_bytes == 0 for s in client.stats())
        group.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_commits_that_carry_their_part_are_replayed(tmp_path: Path, shared_memory: bool) -> None:
    with (
        LocalShards(2, directory=tmp_path) as shards,
        ParameterClient(shards.addresses, shared_memory=shared_memory) as client,
    ):
        _make(client, "log")
        ones = {"job.a": (KEYS, np.ones((len(KEYS), DIM), np.float32))}
        for step in range(4):
            client.commit_async(SERIES, step, 1, parts=ones).result(30)
            _restart(shards, step % 2)
            assert (client.pull("job.a", KEYS) == -(step + 1)).all()


def test_a_part_that_died_with_its_shard_is_missed() -> None:
    """Without durability rows end with the shard; a commit without its part is refused."""
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=10) as client:
        _make(client, "none")
        ones = {"job.a": (KEYS, np.ones((len(KEYS), DIM), np.float32))}
        client.stage_async(SERIES, 0, 0, ones).result(30)
        _restart(shards, 1)
        with pytest.raises(ShardError, match=r"lacks the parts of slots \[0\]"):
            client.commit_async(SERIES, 0, 1).result(30)
        with pytest.raises(ShardError, match=r"lacks the parts of slots \[0\]"):
            client.tally(SERIES, 0, 1)


# A worker that dies: before its part has been answered, after it, or in the middle of a commit.
_WORKER = """
import os, signal, sys, threading
import numpy as np
from ps import ParameterClient

when, after, table, *addresses = sys.argv[1:]
series = f"{table}.s"
client = ParameterClient(addresses, timeout_s=20)
keys = np.arange(3000, dtype=np.uint64)
part = {table: (keys, np.ones((3000, 2), np.float32))}
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
staged = client.stage_async(series, 0, 0, part)
if when == "staging":
    die()
staged.result()
if when == "staged":
    die()
if when == "committing":
    threading.Timer(float(after), die).start()
client.commit_async(series, 0, 1).result()
die()
"""


def test_another_worker_takes_over_from_one_that_was_killed() -> None:
    """Parts are named by series, step and slot, not by who brings them."""
    moments = [("staging", 0.0), ("staged", 0.0), ("committed", 0.0)]
    moments += [("committing", after) for after in (0.0, 0.003)]
    ones = np.ones((len(KEYS), DIM), np.float32)
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=20) as client:
        for number, (when, after) in enumerate(moments):
            table = f"t{number}"
            client.create_table(table, DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
            worker = subprocess.run(
                [sys.executable, "-c", _WORKER, when, str(after), table, *shards.addresses],
                timeout=60,
                check=False,
            )
            assert worker.returncode == -signal.SIGKILL
            client.stage_async(f"{table}.s", 0, 0, {table: (KEYS, ones)}).result(30)
            client.commit_async(f"{table}.s", 0, 1).result(30)
            assert (client.pull(table, KEYS) == -1).all(), when


def test_a_bad_network_changes_no_step() -> None:
    """What is lost is sent again, and what comes late or twice changes nothing."""
    with (
        LocalShards(2) as shards,
        bad_network(shards.addresses) as addresses,
        ParameterClient(shards.addresses, timeout_s=20) as straight,
    ):
        _make(straight, "none")
        group = Group(addresses, shared_memory=False)
        for _ in range(16):
            group.step()
        group.check()
        group.close()


@pytest.mark.parametrize("again", ["restart", "load"])
def test_a_save_has_whole_steps_alone(tmp_path: Path, again: str) -> None:
    """Staged parts are not in it, and how far the series was comes back with the rows."""
    with LocalShards(2, directory=tmp_path / "ck") as shards:
        group = Group(shards.addresses)
        client = group.clients[0]
        _make(client, "none")
        part = {t: (KEYS, np.ones((len(KEYS), DIM), np.float32)) for t in group.sums}
        for _ in range(3):
            group.step()
        client.stage_async(SERIES, 3, 0, part).result(20)
        client.save(tmp_path / "ck")
        client.commit_async(SERIES, 3, 1).result(20)
        client.commit_async(SERIES, 4, 1, parts=part).result(20)
        client.stage_async(SERIES, 5, 0, part).result(20)
        if again == "restart":
            _restart(shards, 0)
            _restart(shards, 1)
        else:
            client.load(tmp_path / "ck")
        group.check()
        assert all(s.staged_bytes == 0 for s in client.stats())
        client.commit_async(SERIES, 2, 1, parts=part).result(20)  # over
        group.check()
        for step in (3, 5):
            with pytest.raises(ShardError, match="lacks"):
                client.commit_async(SERIES, step, 1).result(20)
        client.commit_async(SERIES, 3, 1, parts=part).result(20)
        np.testing.assert_array_equal(client.pull("job.a", KEYS), group.sums["job.a"] - 1)
        group.close()


def test_a_step_is_in_a_save_of_all_shards_or_of_none(tmp_path: Path) -> None:
    """Every row of every shard is of the same step."""
    with LocalShards(3) as shards, ParameterClient(shards.addresses, timeout_s=20) as client:
        _make(client, "none")
        ended, steps = threading.Event(), []

        def work() -> None:
            part = {
                t: (KEYS, np.full((len(KEYS), DIM), -1, np.float32)) for t in ("job.a", "job.b")
            }
            with ParameterClient(shards.addresses, timeout_s=20) as worker:
                while not ended.is_set():
                    step = len(steps)
                    if step % 2:
                        worker.stage_async(SERIES, step, 0, part).result(20)
                        worker.commit_async(SERIES, step, 1).result(20)
                    else:
                        worker.commit_async(SERIES, step, 1, parts=part).result(20)
                    steps.append(step)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(6):
                client.save(tmp_path / f"{number}")
        finally:
            ended.set()
            thread.join(60)
        seen = []
        for number in range(6):
            saved = LocalTable.load_checkpoint(tmp_path / f"{number}")
            values = {float(v) for t in "ab" for v in np.unique(saved[f"job.{t}"].pull(KEYS))}
            assert len(values) == 1, (number, values)
            seen.append(values.pop())
        assert seen == sorted(seen)
        assert seen[-1] > 0
