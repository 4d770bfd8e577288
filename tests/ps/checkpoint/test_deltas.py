"""Deltas: the rows changed since another save, and chains of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import CheckpointError, LocalShards, LocalTable, ParameterClient
from ps.checkpoint.fsspec_store import RemoteStore
from ps.checkpoint.places import open_store
from ps.checkpoint.tables import chain, load_tables, read_checkpoint
from ps.errors import DeltaError
from ps.local.table import save_checkpoint
from ps.table.rules import Admission, Eviction, Score
from tests.keys import keys_of_one_subtable
from tests.ps.checkpoint.manifests import rewrite

KEYS = np.arange(3000)
ALL = np.arange(6000)


def _ones(keys: NDArray[np.int64], dim: int = 4) -> NDArray[np.float32]:
    return np.ones((len(keys), dim), np.float32)


def _make(client: ParameterClient) -> None:
    client.create_table("adam", 4, optimizer="adam", learning_rate=0.1, seed=3)
    client.create_table("evicted", 4, learning_rate=0.1, eviction=Eviction(ttl_steps=10), seed=4)
    client.create_table("admitted", 4, admission=Admission(kind="count", threshold=3), seed=5)
    client.create_table(
        "bloom", 4, admission=Admission(kind="bloom", threshold=3, capacity=10_000), seed=6
    )
    client.create_table("scored", 4, score=Score(decay=0.5), seed=7)


def _step(client: ParameterClient, step: int, rng: np.random.Generator) -> None:
    some = rng.choice(KEYS, 500, replace=False)
    client.push("adam", some, rng.standard_normal((500, 4)).astype(np.float32))
    client.push("evicted", some, _ones(some), step=step)
    client.push("admitted", some[:200], _ones(some[:200]))
    client.push("bloom", some[:200], _ones(some[:200]))
    client.push("scored", some, _ones(some), shows=np.full(500, 3.0), clicks=np.ones(500))


def _state(client: ParameterClient, extra: tuple[str, ...] = ()) -> dict[str, NDArray[np.float32]]:
    """All rows, and what each counter does to what comes next."""
    names = ("adam", "evicted", "admitted", "bloom", "scored", *extra)
    return {name: client.pull(name, ALL, read_only=True) for name in names}


def _probe(client: ParameterClient) -> dict[str, NDArray[np.float32]]:
    """One more step on every key shows optimizers' state, counters and filters."""
    for name in ("adam", "evicted", "admitted", "bloom", "scored"):
        client.push(name, KEYS, _ones(KEYS))
    return _state(client)


def _agree(a: dict[str, NDArray[np.float32]], b: dict[str, NDArray[np.float32]]) -> None:
    assert a.keys() == b.keys()
    for name, rows in a.items():
        np.testing.assert_array_equal(rows, b[name], err_msg=name)


@pytest.mark.parametrize("place", [lambda p: p, lambda p: f"local://{p}"])
def test_a_chain_is_the_full_state(tmp_path: Path, place: Callable[[Path], str | Path]) -> None:
    rng = np.random.default_rng(1)
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        for step in range(3):
            _step(client, step, rng)
        client.save(place(tmp_path / "base"))
        for i in range(4):
            _step(client, 20 + 12 * i, rng)
            assert client.shrink("evicted", step=20 + 12 * i) > 0
            client.shrink("scored")
            if i == 1:  # some that went come back
                client.push("evicted", KEYS[:50], _ones(KEYS[:50]), step=100)
            if i == 2:
                client.create_table("later", 4)
                client.push("later", KEYS, _ones(KEYS))
            since = tmp_path / (f"d{i - 1}" if i else "base")
            client.save(place(tmp_path / f"d{i}"), mode="delta", since=place(since))
        client.save(tmp_path / "full")
        rows = _state(client, ("later",))
        counts = {t.name: t.rows for s in client.stats() for t in s.tables}
        probe = _probe(client)
    delta = read_checkpoint(tmp_path / "d3")
    assert delta.mode == "delta"
    assert delta.parent is not None
    assert sum(f.rows for f in delta.files if f.table == "adam") == 500  # not 3,000
    assert len(chain(open_store(tmp_path / "d3"))) == 5
    assert counts["evicted"] < 1500

    for shards_now in (3, 2):
        with LocalShards(shards_now) as shards, ParameterClient(shards.addresses) as client:
            client.load(place(tmp_path / "d3"))
            _agree(_state(client, ("later",)), rows)
            _agree(_probe(client), probe)
            client.load(tmp_path / "full")
            _agree(_probe(client), probe)
    assert len(LocalTable.load_checkpoint(tmp_path / "d3")["evicted"]) == len(
        LocalTable.load_checkpoint(tmp_path / "full")["evicted"]
    )


def test_what_a_delta_cannot_build_on(tmp_path: Path) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        push = lambda: client.push("adam", KEYS, _ones(KEYS))  # noqa: E731
        push()
        client.save(tmp_path / "base")
        push()
        client.save(tmp_path / "delta", mode="delta", since=tmp_path / "base")
        with pytest.raises(CheckpointError, match="is the place to write to"):
            client.save(tmp_path / "base", mode="delta", since=tmp_path / "base")
        with pytest.raises(CheckpointError, match="holds mode 'delta'; expected base or serving"):
            client.save(tmp_path / "x", mode="serving", since=tmp_path / "delta")

        client.save(tmp_path / "deltas", mode="delta", since=tmp_path / "delta")
        for place in (tmp_path / "base", tmp_path / "other" / ".." / "base"):
            (tmp_path / "other").mkdir(exist_ok=True)
            with pytest.raises(CheckpointError, match="base, which is the place to write to"):
                client.save(place, mode="delta", since=tmp_path / "deltas")
        client.load(tmp_path / "deltas")

        client.save(tmp_path / "base")  # replaces what the delta builds on
        with pytest.raises(CheckpointError, match=r"delta: builds on save .* now holds"):
            client.load(tmp_path / "delta")
        with pytest.raises(DeltaError, match=r"delta: builds on save .* now holds"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "delta")
        client.save(tmp_path / "delta", mode="delta", since=tmp_path / "base")
        client.load(tmp_path / "delta")  # new rows: what changed before is not known of them
        with pytest.raises(DeltaError, match=r"was loaded.*save a whole"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "delta")

        client.save(tmp_path / "base")
        client.drop_tables("adam")
        client.create_table("adam", 4, optimizer="adam", learning_rate=0.1, seed=3)
        for _ in range(3):
            client.save(tmp_path / "more")
        push()
        with pytest.raises(DeltaError, match=r"was .*made anew.*save a whole"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "base")

        client.save(tmp_path / "base")
        a, b = shards.addresses
        c = shards.add()
        client.reshard([a, b, c])
        with pytest.raises(DeltaError, match="written by 2 shards; there are 3 now"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "base")
        client.reshard([a, b])
        with pytest.raises(DeltaError, match=r"moved in part.*save a whole"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "base")

        client.save(tmp_path / "base")
        shards.restart(1)
        with pytest.raises(DeltaError, match=r"restarted since.*save a whole"):
            client.save(tmp_path / "x", mode="delta", since=tmp_path / "base")
        assert not list((tmp_path / "x").glob("*"))  # nothing half-written stays


def test_saves_that_build_on_each_other_are_refused(tmp_path: Path) -> None:
    table = LocalTable.create("t", 1)
    for name in "ab":
        save_checkpoint(tmp_path / name, [table])
    ids = {name: read_checkpoint(tmp_path / name).id for name in "ab"}
    for name, other in (("a", "b"), ("b", "a")):
        parent = {"place": other, "id": ids[other]}
        rewrite(tmp_path / name, lambda tree, p=parent: tree.update(mode="delta", parent=p))
    with pytest.raises(CheckpointError, match="which builds on it"):
        LocalTable.load_checkpoint(tmp_path / "a")


def test_more_evictions_than_a_shard_remembers(tmp_path: Path, client: ParameterClient) -> None:
    client.create_table("evicted", 1, optimizer="sgd", eviction=Eviction(ttl_steps=1))
    keys = keys_of_one_subtable(70_000)
    client.push("evicted", keys, _ones(keys, 1), step=1)
    client.save(tmp_path / "base", prefix="evicted")
    assert client.shrink("evicted", step=10) == len(keys)
    with pytest.raises(DeltaError, match="too many rows were evicted"):
        client.save(tmp_path / "x", prefix="evicted", mode="delta", since=tmp_path / "base")
    assert not list((tmp_path / "x").glob("*"))


def test_weights_for_serving_are_not_for_training(tmp_path: Path, client: ParameterClient) -> None:
    client.create_table("served", 4, optimizer="adam")
    client.push("served", KEYS, _ones(KEYS))
    client.save(tmp_path / "base", prefix="served", mode="base")
    client.push("served", KEYS[:10], _ones(KEYS[:10]))
    client.save(tmp_path / "more", prefix="served", mode="serving", since=tmp_path / "base")
    client.save(tmp_path / "all", prefix="served")
    size = {n: sum(f.bytes for f in read_checkpoint(tmp_path / n).files) for n in ("base", "all")}
    assert size["base"] < 0.6 * size["all"]  # Adam's moments are not in it
    assert sum(f.rows for f in read_checkpoint(tmp_path / "more").files) == 10
    for name in ("base", "more"):
        with pytest.raises(CheckpointError, match="weights for serving; expected a checkpoint"):
            client.load(tmp_path / name)
        with pytest.raises(CheckpointError, match="weights for serving"):
            LocalTable.load_checkpoint(tmp_path / name)


def test_an_object_store(tmp_path: Path) -> None:
    """memory:// has no renaming and no directories of its own, like s3://."""
    url = "memory://bucket/runs/ck"
    table = LocalTable.create("t", 4, seed=1)
    table.push(KEYS, _ones(KEYS))
    table.save(url)
    table.push(KEYS, _ones(KEYS))
    table.save(url)
    store = open_store(url)
    assert isinstance(store, RemoteStore)
    assert sorted(store.entries())[0] == "manifest.json"
    assert len(store.entries()) == 2  # the earlier save's folder is gone
    loaded = LocalTable.load_checkpoint(url)["t"]
    np.testing.assert_array_equal(loaded.pull(KEYS), table.pull(KEYS))
    tables, _ = load_tables(chain(store))
    assert len(tables) == 1
    with pytest.raises(CheckpointError, match="not found"):
        LocalTable.load_checkpoint("memory://bucket/runs/none")
    with pytest.raises(CheckpointError, match="nosuch"):
        LocalTable.load_checkpoint("nosuch://x/y")
