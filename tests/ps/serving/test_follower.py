"""Publishing and following: real shards, publishers that die, bases replaced under a reader."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps import (
    CheckpointError,
    Follower,
    LocalShards,
    ParameterClient,
    Publisher,
    TableError,
    export_checkpoint,
)
from ps.checkpoint.store import LocalStore
from ps.serving.feed import read_feed
from ps.table.rules import Admission, Eviction, Score, Segment
from tests.ps.serving.test_export import parquet_rows

ROOT = Path(__file__).resolve().parents[3]
N = np.arange(500)


@pytest.fixture(scope="module")
def two() -> Iterator[LocalShards]:
    with LocalShards(2) as running:
        yield running


@pytest.fixture
def client(two: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(two.addresses, timeout_s=20) as connected:
        yield connected
        for table in connected.stats()[0].tables:
            connected.drop_tables(table.name)


def ones(n: int, dim: int, value: float = 1.0) -> np.ndarray:
    return np.full((n, dim), value, np.float32)


def agree(follower: Follower, client: ParameterClient, table: str, keys: np.ndarray) -> None:
    np.testing.assert_array_equal(
        follower.lookup(table, keys), client.pull(table, keys, read_only=True)
    )


def test_rows_come_and_go(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 4, optimizer="adam", scale=1.0, eviction=Eviction(ttl_steps=5))
    client.create_table("z", 2, admission=Admission(kind="count", threshold=2, reads="zeros"))
    client.push("t", N, ones(500, 4), step=1)
    publisher = Publisher(client, tmp_path / "feed")
    assert publisher.publish().rows == 500
    first, second = Follower(tmp_path / "feed"), Follower(tmp_path / "feed", tables=["t"])
    assert first.loaded.base.startswith("base-")
    assert (first.tables, second.tables) == (["t", "z"], ["t"])
    agree(first, client, "t", np.arange(600).reshape(2, 300))  # with keys that have no row
    assert not first.poll()
    assert not publisher.publish().saves, "nothing has changed"

    client.push("t", N[:10], ones(10, 4), step=9)
    client.push("z", np.repeat(N, 2), ones(1000, 2))
    client.push("z", [901], ones(1, 2))  # not admitted
    assert client.shrink("t", step=9) == 490
    client.push("t", [300, 700], ones(2, 4), step=9)
    assert len(publisher.publish().saves) == 1
    applied = first.poll()
    assert (applied.base, len(applied.deltas), applied.removed) == ("", 1, 489)
    assert (first.rows("t"), first.rows("z")) == (12, 500)
    for name in ("t", "z"):
        agree(first, client, name, np.arange(1000))
    assert not first.lookup("z", [901]).any()
    assert second.rows("t") == 500, "each follower reads at its own pace"

    client.push("t", [5, -1], ones(2, 4), step=9)
    publisher.publish()
    assert len(second.poll().deltas) == 2
    first.poll()
    for follower in (first, second, Follower(tmp_path / "feed")):
        agree(follower, client, "t", np.arange(-5, 1000))
    with pytest.raises(TableError, match=r"'tt' is not followed.*did you mean 't'"):
        first.lookup("tt", [1])

    export_checkpoint(tmp_path / "feed", tmp_path / "out")
    rows = parquet_rows(tmp_path / "out" / "tables" / "t.parquet")
    assert len(rows) == 13
    np.testing.assert_array_equal(rows[2**64 - 1], client.pull("t", -1))


def test_every_kind_of_row(client: ParameterClient, tmp_path: Path) -> None:
    lazy = (Segment(dim=1, scale=1.0), Segment(dim=4, scale=1.0, optimizer="adam", lazy=2.0))
    client.create_table("lazy", 5, segments=lazy, score=Score(non_click=1.0))
    client.create_table("half", 8, dtype="float16", stochastic_rounding=True, scale=1.0)
    client.create_table("brain", 8, dtype="bfloat16", initializer="normal", scale=1.0)
    client.create_table("bytes", 8, dtype="int8", optimizer="adam", scale=1.0)
    with Publisher(client, tmp_path / "feed", interval_s=3600):
        for round_ in range(3):
            for name, dim in (("lazy", 5), ("half", 8), ("brain", 8), ("bytes", 8)):
                client.push(name, N[: 500 - 200 * round_], ones(500 - 200 * round_, dim))
    follower = Follower(tmp_path / "feed", wait_s=5)
    keys = np.arange(600)
    for name in ("lazy", "half", "brain"):
        agree(follower, client, name, keys)
    np.testing.assert_allclose(
        follower.lookup("bytes", keys), client.pull("bytes", keys), rtol=1e-6, atol=0
    )
    held = sum(t.bytes for s in client.stats() for t in s.tables)
    assert follower.nbytes < held, "no optimizer state"


def test_bases_are_shortcuts_and_old_saves_go(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 2, optimizer="sgd")
    publisher = Publisher(client, tmp_path / "feed", full_every=3, keep=2)
    publisher.publish()
    steady, slow = Follower(tmp_path / "feed"), Follower(tmp_path / "feed")
    for step in range(11):
        client.push("t", N + 10 * step, ones(500, 2))
        # Taken up by another publisher each time: all it needs is in the place.
        publisher = Publisher(client, tmp_path / "feed", full_every=3, keep=2)
        saves = publisher.publish().saves
        assert [s[:5] for s in saves] == (["delta", "base-"] if step % 3 == 2 else ["delta"])
        assert not steady.poll().base, "who keeps up never loads a base again"
    feed = read_feed(LocalStore(tmp_path / "feed"))
    assert feed is not None
    assert [b.number for b in feed.bases] == [6, 9]
    assert [d.number for d in feed.deltas] == [7, 8, 9, 10, 11]
    names = [e.name for e in (*feed.bases, *feed.deltas)]
    assert sorted(os.listdir(tmp_path / "feed")) == sorted([*names, "latest.json"])
    applied = slow.poll()
    assert applied.base == feed.bases[-1].name
    assert len(applied.deltas) == 2
    for follower in (steady, slow):
        assert follower.rows("t") == 600
        agree(follower, client, "t", np.arange(700))


@pytest.mark.parametrize("what", ["load", "recreate", "drop"])
def test_tables_made_anew_begin_a_new_stream(
    client: ParameterClient, tmp_path: Path, what: str
) -> None:
    client.create_table("t", 2, optimizer="sgd")
    client.create_table("u", 2)
    client.push("t", N, ones(500, 2))
    client.save(tmp_path / "checkpoint")
    publisher = Publisher(client, tmp_path / "feed")
    publisher.publish()
    client.push("t", N[:100] + 1000, ones(100, 2))
    publisher.publish()
    follower = Follower(tmp_path / "feed")
    assert follower.rows("t") == 600
    if what == "load":
        client.load(tmp_path / "checkpoint")
    else:
        client.drop_tables("t")
        if what == "recreate":
            client.create_table("t", 2, optimizer="sgd")
            client.push("t", N, ones(500, 2))
    published = publisher.publish()
    assert [s[:5] for s in published.saves] == ["base-"]
    assert follower.poll().base == published.saves[0]
    assert follower.tables == (["u"] if what == "drop" else ["t", "u"])
    if what != "drop":
        assert follower.rows("t") == 500
        agree(follower, client, "t", np.arange(1200))


def test_restarts_and_another_number_of_shards(tmp_path: Path) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("t", 2, optimizer="sgd", durability="log")
        client.push("t", N, ones(500, 2))
        publisher = Publisher(client, tmp_path / "feed")
        publisher.publish()
        follower = Follower(tmp_path / "feed")
        shards.restart(1)
        client.push("t", N, ones(500, 2))
        assert [s[:5] for s in publisher.publish().saves] == ["base-"]
        assert follower.poll().base
        client.push("t", N[:9], ones(9, 2))
        assert [s[:5] for s in publisher.publish().saves] == ["delta"]
        client.reshard([*shards.addresses, shards.add()])
        client.push("t", N, ones(500, 2))
        assert [s[:5] for s in publisher.publish().saves] == ["base-"]
        assert follower.poll().base
        client.push("t", N, ones(500, 2))
        assert [s[:5] for s in publisher.publish().saves] == ["delta"]
        assert follower.poll().deltas
        agree(follower, client, "t", np.arange(600))


class Died(BaseException):
    """Stands for the end of the process: no handler of ours may catch it and go on."""


def test_a_publisher_that_dies_at_any_step(
    client: ParameterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1 << 30]
    for name in ("entries", "open", "replace", "remove", "write"):
        real = getattr(LocalStore, name)

        def step(self, *given, real=real):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] < 0:  # and at every step after, as the dead do nothing
                raise Died
            return real(self, *given)

        monkeypatch.setattr(LocalStore, name, step)
    client.create_table("t", 4, initializer="zeros")
    client.assign("t", N, ones(500, 4))
    place = tmp_path / "feed"
    Publisher(client, place).publish()
    follower = Follower(place)
    steps, before, shown = 0, 1.0, set()

    def publish() -> None:
        # Each time a delta, a base, and what is no longer needed goes.
        Publisher(client, place, full_every=1, keep=1).publish()

    def only_what_is_published() -> bool:
        feed = read_feed(LocalStore(place))
        assert feed is not None
        names = {e.name for e in (*feed.bases, *feed.deltas)} | {"latest.json"}
        return {n for n in os.listdir(place) if n[0] != "."} == names

    while True:
        value = 2.0 + steps
        client.assign("t", N, ones(500, 4, value))
        left[0] = steps
        try:
            publish()
            break
        except Died:
            pass
        finally:
            left[0] = 1 << 30
        steps += 1
        follower.poll()
        for one in (follower, Follower(place)):
            assert one.rows("t") == 500
            values = np.unique(one.lookup("t", N))
            assert values in ([before], [value])
            shown.add(bool(values[0] == value))
        publish()
        assert only_what_is_published(), "what was killed is swept away"
        before = value
    assert steps > 15
    assert shown == {False, True}, "it died before publishing, and after"
    follower.poll()
    assert np.all(follower.lookup("t", N) == value)
    assert only_what_is_published()


KILLED = """
import os, signal, sys
from ps import ParameterClient, Publisher
from ps.serving import feed
at, place, addresses = sys.argv[1], sys.argv[2], sys.argv[3:]
owner, name = {"save": (ParameterClient, "save"), "feed": (feed, "write_feed")}[at]
real, calls = getattr(owner, name), []
def dying(*given, **named):
    calls.append(1)
    if len(calls) < 4:
        return real(*given, **named)
    if at == "save":
        real(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, dying)
with ParameterClient(addresses) as client:
    while True:
        Publisher(client, place, full_every=2, keep=1).publish()
"""


@pytest.mark.parametrize("at", ["save", "feed"])
def test_a_publisher_killed_while_training_goes_on(
    two: LocalShards, client: ParameterClient, tmp_path: Path, at: str
) -> None:
    """Every push writes one number to all keys, so a follower must see one number only."""
    keys = np.arange(20_000)
    place = tmp_path / "feed"
    client.create_table("t", 4, initializer="zeros")
    client.assign("t", keys, ones(len(keys), 4))
    stop = threading.Event()

    def train() -> None:
        value = 1.0
        while not stop.wait(0.02):
            value += 1
            client.assign("t", keys, ones(len(keys), 4, value))

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        argv = [sys.executable, "-c", KILLED, at, str(place), *two.addresses]
        for _ in range(2):
            assert subprocess.run(argv, cwd=ROOT, check=False).returncode == -signal.SIGKILL
            follower = Follower(place)
            assert len(np.unique(follower.lookup("t", keys))) == 1
    finally:
        stop.set()
        trainer.join()
    assert follower.number > 2, "the second went on from the first"
    Publisher(client, place).publish()
    assert not follower.poll().base
    agree(follower, client, "t", keys)


def test_a_base_replaced_under_a_reader(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 2, optimizer="sgd")
    client.push("t", N, ones(500, 2))
    place = tmp_path / "feed"
    publisher = Publisher(client, place)
    publisher.publish()
    before = (place / "latest.json").read_bytes()
    old = json.loads(before)["bases"][0]["name"]
    shutil.rmtree(place)
    client.push("t", N, ones(500, 2))
    publisher.publish()
    now = (place / "latest.json").read_bytes()
    # A reader that still has the old pointer finds its base gone, and takes the new one.
    (place / "latest.json").write_bytes(before)

    class Late(Follower):
        def _advance(self, current):  # type: ignore[no-untyped-def]
            (place / "latest.json").write_bytes(now)
            return super()._advance(current)

    follower = Late(place)
    assert follower.loaded.base != old
    agree(follower, client, "t", N)


def test_damage_is_told_and_nothing_of_it_applied(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 2, optimizer="sgd")
    client.push("t", N, ones(500, 2))
    place = tmp_path / "feed"
    with pytest.raises(CheckpointError, match=r"latest.json: not found"):
        Follower(place)
    publisher = Publisher(client, place)
    publisher.publish()
    follower = Follower(place)
    before = follower.lookup("t", N)
    client.push("t", N, ones(500, 2))
    publisher.publish()
    file = next(place.glob("delta-*/*/*-00001-of-00002.t.rows"))
    good = file.read_bytes()
    file.write_bytes(good[:-30] + bytes([good[-30] ^ 1]) + good[-29:])
    with pytest.raises(CheckpointError, match=f"{file.name}: SHA-256"):
        follower.poll()
    np.testing.assert_array_equal(follower.lookup("t", N), before)
    file.write_bytes(good)
    assert follower.poll()
    agree(follower, client, "t", N)
    latest = (place / "latest.json").read_bytes()
    at = latest.index(b'"number": 0') + 10  # of the base: whoever believes it passes the delta over
    for bit in range(8):
        damaged = latest[:at] + bytes([latest[at] ^ 1 << bit]) + latest[at + 1 :]
        (place / "latest.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"latest.json: it is not what its SHA-256 says"):
            Follower(place)
    (place / "latest.json").write_text('{"format": "heterps-feed", "version": 7}')
    with pytest.raises(CheckpointError, match=r"latest.json: format, version are"):
        follower.poll()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("!")
    with pytest.raises(CheckpointError, match="nothing was published there"):
        Publisher(client, tmp_path / "home").publish()
    assert os.listdir(tmp_path / "home") == ["thesis.txt"]


def test_a_second_publisher_is_refused(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 2)

    class Overtaken(Publisher):
        def _round(self, before):  # type: ignore[no-untyped-def]
            done = super()._round(before)
            client.push("t", N, ones(500, 2))
            Publisher(client, tmp_path / "feed").publish()
            return done

    with pytest.raises(CheckpointError, match="another publisher"):
        Overtaken(client, tmp_path / "feed").publish()
    assert Follower(tmp_path / "feed").rows("t") == 500


def test_through_fsspec(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("t", 2, optimizer="sgd")
    place = f"local://{tmp_path}/feed"  # shards see the same files
    publisher = Publisher(client, place, full_every=2, keep=1)
    publisher.publish()
    follower = Follower(place)
    for step in range(5):
        client.push("t", N + step, ones(500, 2))
        publisher.publish()
        assert len(follower.poll().deltas) == 1
    agree(follower, client, "t", np.arange(600))
    agree(Follower(place), client, "t", np.arange(600))
    made = export_checkpoint(place, f"memory://{tmp_path}/out", "safetensors")
    assert made.rows == 504
