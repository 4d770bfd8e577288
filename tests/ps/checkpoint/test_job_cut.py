"""What cuts of a job are made of: saves between two commits, loads under other names."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from ps import Admission, CheckpointError, LocalShards, LocalTable, ParameterClient, Segment

DIM = 3
KEYS = np.arange(1, 400, dtype=np.uint64)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalShards]:
    with LocalShards(3, directory=tmp_path_factory.mktemp("shards")) as started:
        yield started


@pytest.fixture
def client(shards: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(shards.addresses) as connected:
        yield connected
        for prefix in ("a", "b", "c"):
            connected.drop_tables(prefix)


def _ones(value: float = 1.0) -> np.ndarray:
    return np.full((len(KEYS), DIM), value, np.float32)


def _commit(client: ParameterClient, table: str, step: int, value: float) -> "Future[None]":
    return client.commit_async("a.0", step, 1, parts={table: (KEYS, _ones(value))})


@pytest.mark.parametrize("since", [False, True], ids=["whole", "delta"])
def test_a_save_has_what_was_committed_before_it_was_held_and_nothing_after(
    client: ParameterClient, tmp_path: Path, since: bool
) -> None:
    client.create_table("a.t", DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    _commit(client, "a.t", 0, -1.0).result()
    if since:
        client.save(tmp_path / "0", prefix="a.")
    _commit(client, "a.t", 1, -10.0).result()
    later: list[Future[None]] = []
    client.save(
        tmp_path / "1",
        prefix="a.",
        mode="delta" if since else "checkpoint",
        since=tmp_path / "0" if since else None,
        held=lambda: later.append(_commit(client, "a.t", 2, -100.0)),
    )
    (future,) = later
    future.result()
    np.testing.assert_array_equal(client.pull("a.t", KEYS), _ones(111.0))
    saved = LocalTable.load_checkpoint(tmp_path / "1")["a.t"]
    np.testing.assert_array_equal(saved.pull(KEYS), _ones(11.0))


def test_a_save_that_fails_once_it_was_held_does_not_begin_anew(
    client: ParameterClient, tmp_path: Path
) -> None:
    client.create_table("a.t", DIM)
    (tmp_path / "file").write_text("")
    calls: list[int] = []
    with pytest.raises(CheckpointError):
        client.save(tmp_path / "file" / "x", prefix="a.", held=lambda: calls.append(1))
    assert len(calls) <= 1

    def fail() -> None:
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        client.save(tmp_path / "y", prefix="a.", held=fail)
    client.push("a.t", KEYS, _ones())  # nothing is held any more
    assert not (tmp_path / "y").exists() or not list((tmp_path / "y").rglob("*.rows"))


def test_tables_are_loaded_under_other_names_with_all_that_training_needs(
    client: ParameterClient, tmp_path: Path
) -> None:
    for name in ("a.t", "ab.t", "c.t"):
        client.create_table(name, DIM, optimizer="adam", learning_rate=0.1, seed=3)
        client.push(name, KEYS, _ones(1.0 if name == "a.t" else 5.0))
    client.save(tmp_path / "0")
    client.push("a.t", KEYS, _ones(2.0))
    client.save(tmp_path / "1", mode="delta", since=tmp_path / "0")
    client.create_table("b.t", DIM, optimizer="adam", learning_rate=0.1, seed=3, durability="log")
    client.push("b.t", KEYS[:7], _ones(9.0)[:7])
    others = client.pull("c.t", KEYS)
    assert client.load(tmp_path / "1", rename=("a.", "b.")) == len(KEYS)
    np.testing.assert_array_equal(client.pull("b.t", KEYS), client.pull("a.t", KEYS))
    for name in ("a.t", "b.t"):  # the optimizer's state came along
        client.push(name, KEYS, _ones(-1.0))
    np.testing.assert_array_equal(client.pull("b.t", KEYS), client.pull("a.t", KEYS))
    np.testing.assert_array_equal(client.pull("c.t", KEYS), others)
    names = {table.name for shard in client.stats() for table in shard.tables}
    assert names == {"a.t", "ab.t", "b.t", "c.t"}


def test_what_was_over_in_the_save_is_open_under_another_name(
    client: ParameterClient, tmp_path: Path
) -> None:
    client.create_table("a.t", DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    for step in range(3):
        _commit(client, "a.t", step, -1.0).result()
    client.save(tmp_path / "0", prefix="a.")
    client.drop_tables("a.")
    client.load(tmp_path / "0", rename=("a.", "b."))
    client.commit_async("b.0", 0, 1, parts={"b.t": (KEYS, _ones(-1.0))}).result()
    np.testing.assert_array_equal(client.pull("b.t", KEYS), _ones(4.0))


def test_a_table_of_another_shape_is_refused(client: ParameterClient, tmp_path: Path) -> None:
    client.create_table("a.t", DIM)
    client.push("a.t", KEYS, _ones())
    client.save(tmp_path / "0")
    client.create_table("b.t", DIM + 1)
    with pytest.raises(Exception, match=r"b\.t.*dim"):
        client.load(tmp_path / "0", rename=("a.", "b."))
    with pytest.raises(Exception, match="table name"):
        client.load(tmp_path / "0", rename=("a.", "-b."))
    assert client.pull("b.t", KEYS).shape == (len(KEYS), DIM + 1)


@pytest.mark.parametrize("since", [False, True], ids=["whole", "delta"])
def test_weights_alone_begin_anew_in_the_table_that_is_there(
    client: ParameterClient, tmp_path: Path, since: bool
) -> None:
    """Under its own optimizer, as if they had been its first; what no table is made for is left."""
    for name in ("a.t", "a.u", "a.gone"):
        client.create_table(name, DIM, optimizer="adam", learning_rate=0.1, seed=3)
        client.push(name, KEYS, _ones())
    client.save(tmp_path / "0")
    for name in ("a.t", "a.u"):
        client.push(name, KEYS[:9], _ones(-7.0)[:9])
    if since:
        client.save(tmp_path / "1", mode="delta", since=tmp_path / "0")
    else:
        client.save(tmp_path / "1")
    client.create_table("b.t", DIM, optimizer="sgd", learning_rate=0.5, initializer="zeros")
    client.create_table("b.u", DIM, optimizer="adam", learning_rate=0.1, seed=3)
    client.create_table("b.new", DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    client.push("b.t", KEYS, _ones(9.0))
    client.push("b.new", KEYS, _ones(-2.0))
    weights = client.pull("a.t", KEYS)
    rows = client.load(tmp_path / "1", rename=("a.", "b."), weights_alone=True)
    assert rows == 2 * len(KEYS)
    np.testing.assert_array_equal(client.pull("b.t", KEYS), weights)
    np.testing.assert_array_equal(client.pull("b.u", KEYS), weights)
    np.testing.assert_array_equal(client.pull("b.new", KEYS), _ones(2.0))
    client.push("b.t", KEYS, _ones(2.0))
    np.testing.assert_array_equal(client.pull("b.t", KEYS), weights - 1)
    client.push("b.u", KEYS, _ones(3.0))  # the first step of Adam: by its rate
    np.testing.assert_allclose(client.pull("b.u", KEYS), weights - 0.1, rtol=1e-6)
    names = {table.name for shard in client.stats() for table in shard.tables}
    assert names == {"a.t", "a.u", "a.gone", "b.t", "b.u", "b.new"}


def test_weights_alone_keep_their_usage_and_are_stored_as_the_table_does(
    client: ParameterClient, tmp_path: Path
) -> None:
    seen = Admission(kind="count", threshold=2)
    client.create_table("a.t", DIM, optimizer="adagrad", learning_rate=0.1, admission=seen)
    client.push("a.t", KEYS, _ones())
    client.push("a.t", KEYS[5:], _ones()[5:])
    client.save(tmp_path / "0")
    of_a_row = [
        Segment(dim=1, optimizer="sgd"),
        Segment(dim=2, optimizer="ftrl", learning_rate=1.0),
    ]
    client.create_table("b.t", DIM, segments=of_a_row, dtype="float16", admission=seen)
    client.load(tmp_path / "0", rename=("a.", "b."), weights_alone=True)
    weights = client.pull("a.t", KEYS)
    np.testing.assert_array_equal(
        client.pull("b.t", KEYS[5:]), weights[5:].astype(np.float16).astype(np.float32)
    )
    before = sum(table.rows for shard in client.stats() for table in shard.tables)
    client.push("b.t", KEYS, _ones())  # for the first five the second time
    rows = sum(table.rows for shard in client.stats() for table in shard.tables)
    assert rows == before + 5


def test_weights_alone_of_another_shape_are_refused(
    client: ParameterClient, tmp_path: Path
) -> None:
    client.create_table("a.t", DIM)
    client.push("a.t", KEYS, _ones())
    client.save(tmp_path / "0")
    client.create_table("b.t", DIM + 1, optimizer="sgd")
    with pytest.raises(Exception, match=r"'a\.t' has rows of 3 values; expected 4, as of 'b\.t'"):
        client.load(tmp_path / "0", rename=("a.", "b."), weights_alone=True)
