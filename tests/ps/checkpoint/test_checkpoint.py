"""Checkpoints: resharding, damage, atomic replacement."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps import CheckpointError, LocalShards, LocalTable, ParameterClient
from ps.local.table import save_checkpoint
from tests.ps.checkpoint.manifests import rewrite

KEYS = np.concatenate([np.arange(3000), [-1, 2**62]])


def _fill(client: ParameterClient) -> None:
    client.create_table("a", 4, optimizer="adam", learning_rate=0.1, seed=1)
    client.create_table("b", 3, optimizer="adagrad", learning_rate=0.1, seed=2)
    client.create_table("empty", 2)
    rng = np.random.default_rng(0)
    for _ in range(3):
        client.push("a", KEYS, rng.standard_normal((len(KEYS), 4)).astype(np.float32))
        client.push("b", KEYS, rng.standard_normal((len(KEYS), 3)).astype(np.float32))


def test_save_load_reshard(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ck"
    grads = np.ones((len(KEYS), 4), np.float32)
    with LocalShards(2) as two, ParameterClient(two.addresses) as client:
        _fill(client)
        client.save(path)
        a, b = client.pull("a", KEYS), client.pull("b", KEYS)
        client.push("a", KEYS, grads)
        after = client.pull("a", KEYS)
        assert client.load(path) == 2 * len(KEYS)  # back to the saved rows and state
        np.testing.assert_array_equal(client.pull("a", KEYS), a)
        client.save(path)  # over an earlier one
    assert sorted(p.name for p in path.parent.iterdir()) == ["ck"]
    assert len(list(path.glob("save-*"))) == 1  # the earlier one's files are gone

    with LocalShards(3) as three, ParameterClient(three.addresses) as client:
        assert client.load(path) == 2 * len(KEYS)
        assert client.load(path) == 2 * len(KEYS)
        np.testing.assert_array_equal(client.pull("a", KEYS), a)
        np.testing.assert_array_equal(client.pull("b", KEYS), b)
        assert client.pull("empty", [1]).shape == (1, 2)
        rows = [{t.name: t.rows for t in s.tables} for s in client.stats()]
        assert sum(r["a"] for r in rows) == len(KEYS)
        assert all(r["a"] > 800 for r in rows)
        client.push("a", KEYS, grads)  # the optimizer's state came along
        np.testing.assert_array_equal(client.pull("a", KEYS), after)

    tables = LocalTable.load_checkpoint(path)
    assert sorted(tables) == ["a", "b", "empty"]
    np.testing.assert_array_equal(tables["b"].pull(KEYS), b)
    tables["a"].push(KEYS, grads)
    np.testing.assert_array_equal(tables["a"].pull(KEYS), after)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = LocalTable.create("t", 4, optimizer="adagrad", scale=1.0)
    table.push(np.arange(1000), np.zeros((1000, 4), np.float32))
    save_checkpoint(tmp_path / "ck", [table, LocalTable.create("u", 2)])
    return tmp_path / "ck"


def _rows_file(directory: Path) -> Path:
    (file,) = directory.glob("save-*/*.t.rows")
    return file


def test_local_save_and_load(saved: Path) -> None:
    table = LocalTable.create("t", 4, optimizer="adagrad", scale=1.0)
    table.push([1, 5000], np.ones((2, 4), np.float32))
    table.load(saved)
    assert len(table) == 1000
    table.save(saved)
    with pytest.raises(CheckpointError, match="has no table 'u'; it has t"):
        LocalTable.create("u", 2).load(saved)
    with pytest.raises(CheckpointError, match="seed is 4, asked for 0"):
        LocalTable.create("t", 4, optimizer="adagrad", scale=1.0, seed=4).load(saved)


def test_damage_is_refused(saved: Path, client: ParameterClient) -> None:
    file = _rows_file(saved)
    good = file.read_bytes()
    client.load(saved)
    client.push("t", [1], np.ones((1, 4), np.float32))
    before = client.pull("t", np.arange(9))

    flipped = bytearray(good)
    flipped[700] ^= 1
    for bad, message in ((bytes(flipped), "SHA-256"), (good[:-1], "the manifest says")):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"{file.name}.*{message}"):
            client.load(saved)
        with pytest.raises(CheckpointError, match=message):
            LocalTable.load_checkpoint(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name}: No such file.*manifest names it"):
        client.load(saved)
    (saved / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest.json: .*'format'"):
        client.load(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json: not found"):
        client.load(saved)
    np.testing.assert_array_equal(client.pull("t", np.arange(9)), before)


@pytest.mark.parametrize(
    ("after_spec", "at"),
    [
        (False, 0),  # the magic
        (False, 9),  # the length of the spec
        (False, 13),  # the name's length in the spec
        (True, 3),  # a block's length
        (True, 8),  # its magic
        (True, 12),  # its kind
        (True, 17),  # its count
        (True, 21),  # the bytes of its records
        (True, -8),  # the count of rows
        (True, -1),  # the end is missing
    ],
)
def test_a_damaged_file_with_a_true_checksum_is_refused(
    saved: Path, after_spec: bool, at: int
) -> None:
    file = _rows_file(saved)
    data = bytearray(file.read_bytes())
    spec = int.from_bytes(data[8:12], "little")
    data[at + (12 + spec if after_spec and at > 0 else 0)] ^= 0x41
    if at == -1:
        del data[-3:]
    file.write_bytes(data)

    def change(tree: dict[str, Any]) -> None:
        entry = next(f for f in tree["files"] if f["name"].endswith(file.name))
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()

    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=file.name):
        LocalTable.load_checkpoint(saved)


def test_a_failed_save_leaves_the_earlier_checkpoint(saved: Path) -> None:
    good = _rows_file(saved).read_bytes()
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=1) as client:
        client.create_table("t", 4, optimizer="adagrad", scale=1.0)
        shards.processes[1].process.kill()
        with pytest.raises(RuntimeError, match="shard 1"):
            client.save(saved, timeout_s=5)
    assert _rows_file(saved).read_bytes() == good  # and no half-written folder lies about
    LocalTable.load_checkpoint(saved)


def test_save_never_replaces_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        LocalTable.create("t", 4).save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../etc/passwd", "file name"),
        ("/etc/passwd", "file name"),
        ("save-000000000000000-00000000/../x", "file name"),
    ],
)
def test_a_manifest_names_no_files_elsewhere(saved: Path, name: str, message: str) -> None:
    rewrite(saved, lambda tree: tree["files"][0].update(name=name))
    with pytest.raises(CheckpointError, match=message):
        LocalTable.load_checkpoint(saved)
