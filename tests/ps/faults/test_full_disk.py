"""Disks without room: nothing acknowledged is lost, and all goes on once there is some."""

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos.reason_pb2 import DISK_FULL
from ps import LocalShards, ParameterClient, ShardError
from ps.errors import NoRoomError
from ps.shard import logfile
from ps.shard.directory import ShardDirectory
from ps.shard.state import ShardState
from ps.table.spec import make_spec
from tests.disks import small_disk

DIM = 32
KEYS = np.arange(2000)
MIB = 1 << 20


def _make(client: ParameterClient, name: str, durability: str) -> None:
    client.create_table(
        name,
        DIM,
        optimizer="sgd",
        learning_rate=1.0,
        initializer="zeros",
        durability=durability,
    )


def test_a_shard_outlives_a_full_disk(tmp_path: Path) -> None:
    """Folds fail, then pushes; with room again both go on, and what was acknowledged is there."""
    rng = np.random.default_rng(1)
    counts = np.zeros(len(KEYS), np.int64)
    with (
        small_disk(tmp_path / "disk", 3 * MIB) as disk,
        LocalShards(1, data=disk.path, options=("--fold", "0.05")) as shards,
        ParameterClient(shards.addresses, timeout_s=30) as client,
    ):
        kept = disk.path / "shard-0"

        def push(size: int = 300) -> None:
            keys = rng.choice(KEYS, size, replace=False)
            client.push("log", keys, np.full((size, DIM), -1, np.float32))
            counts[keys] += 1

        _make(client, "log", "log")
        _make(client, "checkpoint", "checkpoint")  # it is what makes folds due
        client.push("checkpoint", KEYS, np.ones((len(KEYS), DIM), np.float32))
        client.save(tmp_path / "early")
        disk.fill(left=600_000)
        _until_refused(push)
        with pytest.raises(ShardError, match="the log cannot take this change") as refused:
            push()
        assert refused.value.reason == DISK_FULL
        with pytest.raises(ShardError, match="No space left") as refused:
            client.save(disk.path / "save")
        assert refused.value.reason == DISK_FULL
        with pytest.raises(ShardError, match="has no room") as refused:
            client.load(tmp_path / "early")
        assert refused.value.reason == DISK_FULL
        np.testing.assert_array_equal(client.pull("log", KEYS)[:, 0], counts)
        assert not [path for path in (kept / "base").glob("save-*") if not _named(kept, path)]
        assert len(logfile.paths(kept)) < 10
        push(1)  # what fits is taken
        disk.relieve()
        for _ in range(5):
            push()
        np.testing.assert_array_equal(client.pull("log", KEYS)[:, 0], counts)
        shards.processes[0].process.kill()
        shards.restart(0)
        np.testing.assert_array_equal(client.pull("log", KEYS)[:, 0], counts)


def _until_refused(push: Callable[[], None]) -> None:
    """Push until the disk has no room."""
    while True:
        try:
            push()
        except ShardError as error:
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return


def _named(kept: Path, folder: Path) -> bool:
    manifest = kept / "base" / "manifest.json"
    return manifest.exists() and folder.name in manifest.read_text()


def test_a_base_that_does_not_fit_leaves_nothing_and_is_put_off(tmp_path: Path) -> None:
    spec = make_spec("t", DIM, optimizer="sgd", initializer="zeros", durability="checkpoint")
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        state = ShardState()
        durable = ShardDirectory(state, disk.path / "shard", interval_s=0.0)
        state.create(spec)
        keys = np.arange(9000, dtype=np.uint64)
        values = np.ones((len(keys), DIM), np.float32)
        state.tables["t"].native.push(keys, 8, values, "assign", 1.0, 0, 0, 0, None)
        disk.fill(left=200_000)
        before = logfile.paths(disk.path / "shard")
        assert durable.due()
        with pytest.raises(NoRoomError, match="has no room in the"):
            durable.fold()
        assert not durable.due(), "it is tried again after a pause"
        # Room that goes while the base is being written.
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(ShardDirectory, "_check_room", lambda *_: None)
        for attempt in range(3):
            with pytest.raises(NoRoomError):
                durable.fold()
            assert list((disk.path / "shard" / "base").iterdir()) == [], attempt
        monkeypatch.undo()
        assert logfile.paths(disk.path / "shard")[: len(before)] == before
        disk.relieve()
        durable.fold()
        assert len(logfile.paths(disk.path / "shard")) == 1
        durable.close()
        again = ShardState()
        ShardDirectory(again, disk.path / "shard").close()
        np.testing.assert_array_equal(again.tables["t"].native.pull(keys, True), values)


def test_rows_beyond_memory_find_no_room_on_the_disk(tmp_path: Path) -> None:
    """A push is refused before it has changed anything; rows that are there still learn."""
    counts = np.zeros(40_000, np.int64)
    with (
        small_disk(tmp_path / "disk", 24 * MIB) as disk,
        LocalShards(1, options=("--disk", str(disk.path))) as shards,
        ParameterClient(shards.addresses, timeout_s=30) as client,
    ):
        client.create_table(
            "t",
            DIM,
            optimizer="sgd",
            learning_rate=1.0,
            initializer="zeros",
            memory_bytes=MIB,
            durability="log",
        )

        def push(begin: int) -> None:
            keys = np.arange(begin, begin + 1000)
            client.push("t", keys, np.full((1000, DIM), -1, np.float32))
            counts[keys] += 1

        push(0)
        disk.fill()
        begins = iter(range(0, 40_000, 1000))
        _until_refused(lambda: push(next(begins)))
        keys = np.arange(len(counts))
        np.testing.assert_array_equal(client.pull("t", keys)[:, 0], counts)
        disk.relieve()
        for begin in range(0, 40_000, 1000):
            push(begin)
        np.testing.assert_array_equal(client.pull("t", keys)[:, 0], counts)
        shards.processes[0].process.kill()
        shards.restart(0)
        np.testing.assert_array_equal(client.pull("t", keys)[:, 0], counts)
