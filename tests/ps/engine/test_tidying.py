"""Rows on disk that are moved together, so that room between them is used again."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import LocalTable
from ps.engine import _native
from ps.table.rules import Eviction
from ps.table.spec import make_table
from tests.ps.crowded import crowded
from tests.rounds import more

EXTENT = 256  # rows of the file that are filled, and emptied, together
BLOCK = 4096  # bytes, which they begin and end at
HEAD, USAGE = 14, 20  # bytes of a row on disk besides


def made(dim: int, memory_bytes: int, **options: Any) -> LocalTable:
    return LocalTable.create(
        "t",
        dim,
        memory_bytes=memory_bytes,
        optimizer="sgd",
        learning_rate=1.0,
        initializer="zeros",
        **options,
    )


def most_bytes(table: LocalTable, rows: int, parts: int = 64) -> float:
    """Of a file, which may have this many holes and has had so many rows at most."""
    used = USAGE if table.spec.HasField("eviction") else 0
    record = (HEAD + used + 4 * table.dim + 3) // 4 * 4
    extent = -(-EXTENT * record // BLOCK) * BLOCK
    return (1.42 * rows / EXTENT + 5 * parts) * extent


class Reference:
    """What a table of `crowded` keys is to hold: counts, all columns alike."""

    def __init__(self, dim: int, count: int) -> None:
        self.keys = crowded(count)
        self.dim = dim
        self.values = np.zeros(count, np.float32)
        self.steps = np.full(count, -1)  # of the last push; of keys without a row -1

    def push(self, table: LocalTable, which: NDArray[np.int64], step: int) -> None:
        values = np.random.default_rng(step).integers(-9, 9, len(which)).astype(np.float32)
        table.push(self.keys[which], -np.repeat(values[:, None], self.dim, 1), step=step)
        self.values[which] += values
        self.steps[which] = step

    def evict(self, older_than: int) -> int:
        old = (self.steps >= 0) & (self.steps < older_than)
        self.steps[old], self.values[old] = -1, 0
        return int(old.sum())

    @property
    def rows(self) -> dict[int, float]:
        there = self.steps >= 0
        return dict(zip(self.keys[there].tolist(), self.values[there].tolist(), strict=True))


def rows_of(table: Any, dim: int) -> dict[int, float]:
    keys = np.array(table.keys(1 << 20), np.uint64)
    assert len(np.unique(keys)) == len(keys)
    rows = table.pull(keys, True)
    assert (rows == rows[:, :1]).all()
    return dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("seed", [0, *more(1, 2, 3)])
def test_rows_go_and_come_while_those_on_disk_move(tmp_path: Path, seed: int) -> None:
    """Pushes, pulls, evictions, keys that come again, and saves of what has changed, at random."""
    dim, count, ttl = 8, 6000, 60
    rng = np.random.default_rng(seed)
    table = made(dim, 64 * 110_000, eviction=Eviction(ttl_steps=ttl))
    said = Reference(dim, count)
    names = rng.permutation(count)
    copy = make_table(table.spec, str(tmp_path))
    snapshot, cut, at_cut, saves = None, 0, dict[int, float](), 0
    for step in range(400):
        part = rng.integers(0, count, rng.integers(1, 400))
        some = (rng.pareto(0.6, int(rng.integers(1, 900))) * 60).astype(np.int64) % count
        said.push(table, names[np.unique(np.concatenate([part, some]))], step)
        what = rng.integers(0, 10)
        if what < 3:
            which = rng.integers(0, count, 300)
            rows = table.pull(said.keys[which], read_only=bool(what))
            np.testing.assert_array_equal(rows[:, 0], said.values[which])
        elif what == 3:
            assert table.shrink(step=step) == said.evict(step - ttl)
        elif what == 4:
            table._table.demote()
        if snapshot is None and rng.integers(0, 10) == 0:
            snapshot = table._table.snapshot(since=cut, values=False, min_score=0.0, buckets=None)
            cut, at_cut = snapshot.cut, said.rows
        elif snapshot is not None and rng.integers(0, 3) == 0:
            block = snapshot.next()
            if block is not None:
                copy.absorb(block, None)
                continue
            snapshot, saves = None, saves + 1
            assert rows_of(copy, dim) == at_cut
    assert rows_of(table._table, dim) == said.rows
    counters = table.counters
    assert counters["tidied"] > 20 * EXTENT
    assert saves > 3
    assert counters["disk_bytes"] <= most_bytes(table, count, parts=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_snapshot_has_each_row_once_while_they_move(seed: int) -> None:
    dim, count = 4, 5000
    rng = np.random.default_rng(seed)
    table, said = made(dim, 64 * 90_000), Reference(dim, count)
    for step in range(60):
        said.push(table, np.unique(rng.integers(0, count, 1500)), step)
    assert len(said.rows) == count
    snapshot = table._table.snapshot(since=0, values=True, min_score=0.0, buckets=None)
    at_cut, found = said.rows, dict[int, float]()
    tidied = table.counters["tidied"]
    step = 60
    while (block := snapshot.next()) is not None:
        _, keys, values = _native.decode_block(block, dim)
        assert not found.keys() & set(keys.tolist())
        found.update(zip(keys.tolist(), values[:, 0].tolist(), strict=True))
        for _ in range(3):
            said.push(table, np.unique(rng.integers(0, count, 900)), step)
            step += 1
    assert found == at_cut
    assert table.counters["tidied"] > tidied + EXTENT


def test_a_file_stays_small_where_much_leaves_memory_at_once() -> None:
    """Of a memory of many extents: each that is filled is made up for."""
    dim, count = 2, 15_000
    table, said = made(dim, 64 * 250_000), Reference(dim, count)
    rng = np.random.default_rng(5)
    for step in range(40):
        said.push(table, np.unique(rng.integers(0, count, 7_500)), step)
        used = table.counters
        assert used["disk_bytes"] <= most_bytes(table, count, parts=1), step
    assert used["demoted"] > 8 * count
    assert used["disk_rows"] > count // 4
    rows = table.pull(said.keys, read_only=True)
    np.testing.assert_array_equal(rows[:, 0], said.values)


def test_rows_are_where_they_were_when_a_write_fails() -> None:
    """Neither those that were to leave memory nor those that were to move are lost or doubled."""
    dim, count = 8, 6000
    table, said = made(dim, 64 * 110_000), Reference(dim, count)
    rng = np.random.default_rng(3)
    for step in range(60):
        said.push(table, np.unique(rng.integers(0, count, 1500)), step)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = 0
    for most in np.linspace(0, table.counters["disk_bytes"], 12)[:-1]:
        for _ in range(6):
            which = rng.integers(0, count, 1200)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), limits[1]))
            try:
                table.pull(said.keys[which])
            except _native.BrokenError as error:
                failed += "File too large" in str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert rows_of(table._table, dim) == said.rows
    assert failed > 10
    snapshot = table._table.snapshot(since=0, values=True, min_score=0.0, buckets=None)
    found = list[int]()
    while (block := snapshot.next()) is not None:
        found += _native.decode_block(block, dim)[1].tolist()
    assert sorted(found) == said.keys.tolist()
    said.push(table, np.arange(count), 99)
    assert rows_of(table._table, dim) == said.rows


@pytest.mark.parametrize("seed", [0, 1])
def test_a_file_of_all_parts_has_few_holes(seed: int) -> None:
    count = 100_000
    rng = np.random.default_rng(seed)
    table = made(1, 1 << 20)
    rows = np.zeros(count, np.float32)
    names = rng.permutation(count)
    for number in range(60):
        part = slice(2000 * number % count, 2000 * number % count + 2000)
        some = names[np.unique((rng.pareto(0.5, 5000) * 500).astype(np.int64) % count)]
        keys = np.union1d(some, names[part])
        grads = rng.integers(-9, 9, len(keys)).astype(np.float32)
        table.push(keys, grads[:, None])
        rows[keys] -= grads
        if number % 10 == 9:
            every = np.arange(count)
            np.testing.assert_array_equal(table.pull(every, read_only=True)[:, 0], rows)
            used = table.counters
            assert used["disk_bytes"] <= most_bytes(table, used["disk_rows"])
    assert used["disk_rows"] > count // 3
