"""Any sequence of operations leaves a table as it leaves a dictionary of float32 rows."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from numpy.typing import NDArray

from ps import LocalTable
from ps.engine import _native
from ps.table.rules import Admission, Eviction, Segment
from ps.table.spec import make_table

Row = NDArray[np.float32]
# Multiples of a half: sums of these, and steps by them, are the same in any order.
numbers = st.integers(-8, 8).map(float)
one_key = st.one_of(st.integers(0, 40), st.sampled_from([2**32 - 1, 2**32, 2**63, 2**64 - 1]))
key_lists = st.one_of(
    st.lists(one_key, max_size=12),
    st.tuples(st.integers(0, 400), st.integers(1, 300), st.integers(1, 3)).map(
        lambda t: list(range(t[0], t[0] + t[1], t[2]))
    ),
)


@dataclass
class Entry:
    """What a key has: a row, unless it only waits."""

    row: Row | None = None
    full: bool = True
    count: int = 0
    step: int = 0


@dataclass
class Model:
    """The dictionary.

    Attributes:
        first: a table that never changes, which knows first values of all columns.
        wide: how many columns a row always has; the others come at `lazy` pushes.
        threshold: pushes until a key gets a row.
        ttl: steps.
    """

    first: LocalTable
    wide: int
    lazy: int = 0
    threshold: int = 1
    ttl: int = 0
    zeros: bool = False
    entries: dict[int, Entry] = field(default_factory=dict)

    def copy(self) -> dict[int, Row]:
        return {k: self.read(k) for k in self.rows()}

    def rows(self) -> list[int]:
        return sorted(k for k, e in self.entries.items() if e.row is not None)

    def read(self, key: int) -> Row:
        entry = self.entries.get(key)
        if entry is None or entry.row is None:
            row = self._first(key)
            return np.zeros_like(row) if self.zeros else self._narrow(row)
        return entry.row if entry.full else self._narrow(entry.row)

    def push(self, kind: str, keys: list[int], values: Row, step: int) -> None:
        total: dict[int, Row] = {}
        for key, value in zip(keys, values, strict=True):
            again = key in total and kind != "assign"
            total[key] = total[key] + value if again else value
        for key, value in total.items():
            self._push_one(kind, key, value, keys.count(key), step)

    def _push_one(self, kind: str, key: int, value: Row, count: int, step: int) -> None:
        entry = self.entries.setdefault(key, Entry())
        entry.count += count
        entry.step = step
        if entry.row is None:
            if kind == "" and entry.count < self.threshold:
                return
            entry.row, entry.full = self._first(key), not self.lazy
        width = len(entry.row) if entry.full else self.wide
        row = entry.row.copy()
        if kind == "assign":
            row[:width] = value[:width]
        elif kind == "add":
            row[:width] += value[:width]
        else:
            row[:width] -= np.float32(0.5) * value[:width]
        entry.row = row
        entry.full = entry.full or entry.count >= self.lazy

    def shrink(self, step: int) -> int:
        old = [k for k, e in self.entries.items() if step - e.step > self.ttl]
        for key in old:
            del self.entries[key]
        return len(old)

    def _first(self, key: int) -> Row:
        return self.first.pull(np.uint64([key]))[0]

    def _narrow(self, row: Row) -> Row:
        row = row.copy()
        if self.lazy:
            row[self.wide :] = 0
        return row


class Machine(RuleBasedStateMachine):
    """Operations at random; subclasses say on what kind of table."""

    dim = 3
    options: ClassVar[dict[str, Any]] = {"optimizer": "sgd", "learning_rate": 0.5, "scale": 1.0}
    eager: ClassVar[dict[str, Any]] = options  # the same with all columns from the start
    model_options: ClassVar[dict[str, Any]] = {}

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="model-"))
        self.table = LocalTable.create("t", self.dim, **self.options)
        first = LocalTable.create("t", self.dim, **self.eager)
        self.model = Model(first, **{"wide": self.dim} | self.model_options)
        self.step = 0
        self.snapshot: _native.Snapshot | None = None
        self.at_cut: dict[int, Row] = {}
        self.copy: _native.Table | None = None  # what the snapshots so far have told
        self.cut = 0

    def teardown(self) -> None:
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    @rule(
        kind=st.sampled_from(["", "", "", "add", "assign"]),
        keys=key_lists,
        value=numbers,
        slope=numbers,
    )
    def push(self, kind: str, keys: list[int], value: float, slope: float) -> None:
        values = value + slope * np.arange(self.dim) + np.arange(len(keys))[:, None] % 5
        values = values.astype(np.float32)
        self.step += 1
        self.table.push(np.array(keys, np.uint64), values, kind=kind, step=self.step)
        self.model.push(kind, keys, values, self.step)

    @rule(keys=key_lists, read_only=st.booleans())
    def pull(self, keys: list[int], read_only: bool) -> None:
        got = self.table.pull(np.array(keys, np.uint64), read_only)
        assert got.shape == (len(keys), self.dim)
        for key, row in zip(keys, got, strict=True):
            np.testing.assert_array_equal(row, self.model.read(key))

    @rule()
    def demote(self) -> None:
        self.table._table.demote()

    @rule(steps=st.integers(0, 6))
    def shrink(self, steps: int) -> None:
        self.step += steps
        expected = self.model.shrink(self.step) if self.model.ttl else 0
        assert self.table.shrink(step=self.step) == expected

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def save_and_load(self) -> None:
        self.table.save(self.folder / "ck")
        self.table = LocalTable.create("t", self.dim, **self.options)
        self.table.push([3], np.ones((1, self.dim), np.float32))  # replaced by what is loaded
        self.table.load(self.folder / "ck")
        self.copy = None  # generations begin anew

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin_snapshot(self) -> None:
        since = self.cut if self.copy is not None else 0
        if self.copy is None:
            self.copy = make_table(self.table.spec, str(self.folder))
        self.snapshot = self.table._table.snapshot(
            since=since, values=False, min_score=0.0, buckets=None
        )
        self.cut = self.snapshot.cut
        self.at_cut = self.model.copy()
        self.waiting_at_cut = self.table.counters["waiting"]

    @precondition(lambda self: self.snapshot is not None)
    @rule(blocks=st.integers(1, 200))
    def read_snapshot(self, blocks: int) -> None:
        assert self.snapshot is not None
        assert self.copy is not None
        for _ in range(blocks):
            block = self.snapshot.next()
            if block is None:
                self.snapshot = None
                break
            self.copy.absorb(block, None)
        if self.snapshot is None:
            assert sorted(self.copy.keys(1 << 20).tolist()) == sorted(self.at_cut)
            assert self.copy.counters()["waiting"] == self.waiting_at_cut
            for key, row in self.at_cut.items():
                np.testing.assert_array_equal(self.copy.pull(np.uint64([key]), True)[0], row)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        rows = self.model.rows()
        assert sorted(self.table.keys().tolist()) == rows
        counters = self.table.counters
        assert counters["rows"] == len(rows)
        assert counters["waiting"] == len(self.model.entries) - len(rows)
        assert 0 <= counters["disk_rows"] <= counters["rows"]


class PlainMachine(Machine):
    """All in memory."""


class TieredMachine(Machine):
    """Four of five rows on disk."""

    dim = 40
    options: ClassVar[dict[str, Any]] = Machine.options | {
        "memory_bytes": 1 << 16,
        "eviction": Eviction(ttl_steps=5),
    }
    model_options: ClassVar[dict[str, Any]] = {"ttl": 5}


class LazyMachine(Machine):
    """Most columns only from the third push on; many rows on disk."""

    dim = 40
    _part: ClassVar[dict[str, Any]] = {
        "learning_rate": 0.5, "optimizer": "sgd", "scale": 1.0, "seed": 3,
    }  # fmt: skip
    options: ClassVar[dict[str, Any]] = {
        "segments": [Segment(dim=2, **_part), Segment(dim=38, lazy=3, **_part)],
        "memory_bytes": 1 << 16,
    }
    eager: ClassVar[dict[str, Any]] = {
        "segments": [Segment(dim=2, **_part), Segment(dim=38, **_part)]
    }
    model_options: ClassVar[dict[str, Any]] = {"wide": 2, "lazy": 3}


class CountingMachine(Machine):
    """Rows at the third push; keys, waiting or not, are forgotten after a while."""

    dim = 40
    options: ClassVar[dict[str, Any]] = Machine.options | {
        "admission": Admission(kind="count", threshold=3, reads="zeros"),
        "eviction": Eviction(ttl_steps=4),
        "memory_bytes": 1 << 16,
    }
    model_options: ClassVar[dict[str, Any]] = {"threshold": 3, "ttl": 4, "zeros": True}


_SETTINGS = settings(
    max_examples=30,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPlain = PlainMachine.TestCase
TestTiered = TieredMachine.TestCase
TestLazy = LazyMachine.TestCase
TestCounting = CountingMachine.TestCase
for _case in (TestPlain, TestTiered, TestLazy, TestCounting):
    _case.settings = _SETTINGS
del _case
