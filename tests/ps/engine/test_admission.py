"""When a key gets a row: counts, a Bloom filter, chance, scores; and lazy segments."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import LocalTable
from ps.table.rules import Admission, Eviction, Score, Segment
from ps.table.spec import make_spec, make_table

SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "scale": 1.0}


def ones(keys: Any, dim: int = 2) -> NDArray[np.float32]:
    return np.ones((*np.shape(keys), dim), np.float32)


def make(kind: str, threshold: float, dim: int = 2, **options: Any) -> LocalTable:
    given = {k: options.pop(k) for k in ("capacity", "false_positive", "reads") if k in options}
    admission = Admission(kind=kind, threshold=threshold, **given)
    return LocalTable.create("t", dim, **SGD | options, admission=admission)


@pytest.mark.parametrize("kind", ["count", "bloom"])
@pytest.mark.parametrize("threshold", [1, 2, 3, 10])
def test_a_key_is_admitted_at_its_count(kind: str, threshold: int) -> None:
    table = make(kind, threshold)
    first = table.pull([5, 6])
    for _ in range(threshold - 1):
        table.push([5], ones([5]))
        assert len(table) == 0
        np.testing.assert_array_equal(table.pull([5, 6]), first)  # those gradients are gone
    table.push([5], ones([5]))
    assert table.keys().tolist() == [5]
    np.testing.assert_array_equal(table.pull([5, 6]), first - [[1, 1], [0, 0]])


@pytest.mark.parametrize("kind", ["count", "bloom"])
def test_repeated_keys_of_a_push_all_count(kind: str) -> None:
    table = make(kind, 5)
    first = table.pull([5])
    table.push([5, 7, 5, 5], ones(range(4)))
    assert len(table) == 0
    table.push([5, 5], ones(range(2)))
    assert table.keys().tolist() == [5]
    np.testing.assert_array_equal(table.pull([5]), first - 2)  # what admitted it counts whole


@pytest.mark.parametrize("kind", ["count", "bloom"])
def test_shows_count_as_so_many_pushes(kind: str) -> None:
    table = make(kind, 10)
    table.push([1, 2, 3], ones(range(3)), shows=[10, 9, 0])
    assert table.keys().tolist() == [1]
    table.push([2, 3], ones(range(2)), shows=[0, 9])  # a push is one at least
    assert sorted(table.keys().tolist()) == [1, 2, 3]


def test_waiting_keys_are_counted_and_saved(tmp_path: Path) -> None:
    table = make("count", 3)
    table.push(np.arange(100), ones(range(100)))
    table.push(np.arange(50), ones(range(50)))
    assert (table.counters["waiting"], table.counters["rows"]) == (100, 0)
    table.push(np.arange(20), ones(range(20)))
    assert (table.counters["waiting"], table.counters["rows"]) == (80, 20)
    table.save(tmp_path / "ck")
    other = make("count", 3)
    other.load(tmp_path / "ck")
    other.push(np.arange(100), ones(range(100)))
    assert sorted(other.keys().tolist()) == list(range(50))


def test_what_is_written_outright_needs_no_admission() -> None:
    for kind in ("count", "bloom"):
        table = make(kind, 100)
        table.push([1], 7 * ones([1]), kind="assign")
        first = table.pull([2])
        table.push([2], ones([2]), kind="add")
        np.testing.assert_array_equal(table.pull([1, 2]), [[7, 7], first[0] + 1])
        table.push([1], ones([1]))
        np.testing.assert_array_equal(table.pull([1]), [[6, 6]])


@pytest.mark.parametrize("kind", ["count", "bloom", "probability", "score"])
def test_a_key_without_a_row_may_read_zeros(kind: str) -> None:
    score = {"score": Score()} if kind == "score" else {}
    table = make(kind, 1.0, reads="zeros", **score)
    initial = LocalTable.create("t", 2, **SGD).pull([1, 2])
    assert not table.pull([1, 2]).any()
    table.push([1], ones([1]), **({"shows": [20]} if score else {}))
    # Once admitted it begins with its first value.
    np.testing.assert_array_equal(table.pull([1, 2]), [initial[0] - 1, [0, 0]])


def test_the_filter_is_never_late() -> None:
    """Also when it holds four times what it was made for."""
    table = make("bloom", 3, capacity=1000, false_positive=0.1)
    keys = np.arange(4000)
    for _ in range(3):
        table.push(keys, ones(keys))
    assert sorted(table.keys().tolist()) == keys.tolist()


@pytest.mark.parametrize("promised", [0.1, 0.01])
def test_the_filter_is_early_as_rarely_as_promised(promised: float) -> None:
    capacity = 40_000
    table = make("bloom", 2, dim=1, capacity=capacity, false_positive=promised)
    keys = np.random.default_rng(0).integers(0, 2**63, capacity)
    for begin in range(0, capacity, 4000):
        some = keys[begin : begin + 4000]
        table.push(some, ones(some, 1))
    before = len(table)  # keys admitted at their first push, while it filled
    assert before < promised * capacity
    strangers = np.random.default_rng(1).integers(0, 2**63, 20_000)
    fresh = make("bloom", 2, dim=1, capacity=capacity, false_positive=promised)
    fresh.push(keys, ones(keys, 1))
    admitted = len(fresh)
    fresh.push(strangers, ones(strangers, 1))
    rate = (len(fresh) - admitted) / len(strangers)
    # Strangers fill it beyond its capacity by half, which costs some of the promise.
    assert promised / 10 < rate < 3.5 * promised


def test_the_filter_has_a_fixed_size_and_is_saved(tmp_path: Path) -> None:
    table = make("bloom", 4, dim=1, capacity=100_000, false_positive=0.01)
    size = table.nbytes
    keys = np.arange(20_000)
    for _ in range(3):
        table.push(keys, ones(keys, 1))
    assert len(table) < 20
    assert table.nbytes < size + 20 * 200
    table.save(tmp_path / "ck")
    other = make("bloom", 4, dim=1, capacity=100_000, false_positive=0.01)
    other.load(tmp_path / "ck")
    other.push(keys[::2], ones(keys[::2], 1))
    assert len(other) >= 10_000
    assert set(keys[::2].tolist()) <= set(other.keys().tolist())


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_chance_admits_its_share(share: float) -> None:
    table = make("probability", share, dim=1)
    keys = np.arange(20_000)
    table.push(keys, ones(keys, 1))
    deviation = (share * (1 - share) / len(keys)) ** 0.5
    assert abs(len(table) / len(keys) - share) <= 5 * deviation
    # Another push, other luck: independent of the first.
    table.push(keys, ones(keys, 1))
    again = 1 - (1 - share) ** 2
    assert abs(len(table) / len(keys) - again) <= 5 * deviation


def test_the_same_push_has_the_same_luck() -> None:
    spec = make_spec("t", 1, admission=Admission(kind="probability", threshold=0.3), **SGD)
    keys = np.arange(1000, dtype=np.uint64)

    def admitted(nonces: list[int]) -> list[int]:
        table = make_table(spec)
        for nonce in nonces:
            table.push(
                keys, 8, ones(keys, 1), kind="", rate=1.0, nonce=nonce, time_s=0, step=0, usage=None
            )
        return sorted(table.keys(10_000).tolist())

    assert 200 < len(admitted([1])) < 400
    assert admitted([1]) == admitted([1]) == admitted([1, 1])
    assert admitted([1]) != admitted([2])
    assert admitted([1, 2]) == sorted(set(admitted([1])) | set(admitted([2])))


def test_a_score_admits_at_its_threshold() -> None:
    """non_click * (shows - clicks) + click * clicks, all of them exact in binary."""
    table = make("score", 2.0, score=Score(non_click=0.25, click=1.0, decay=0.5))
    keys = np.arange(4)
    table.push(keys, ones(keys), shows=[8, 7, 5, 2], clicks=[0, 0, 1, 2])
    assert sorted(table.keys().tolist()) == [0, 2, 3]  # of 2, 1.75, 2 and 2
    assert table.counters["waiting"] == 1
    table.push([1], ones([1]))
    assert sorted(table.keys().tolist()) == [0, 1, 2, 3]
    # What waits decays as well.
    table.push([9], ones([9]), shows=[7])
    table.shrink()
    table.push([9], ones([9]), shows=[4])  # 7 / 2 + 4 = 7.5 shows
    assert len(table) == 4
    table.push([9], ones([9]), shows=[0.5])
    assert len(table) == 5


def test_an_evicted_key_is_counted_anew() -> None:
    table = make("count", 3, eviction=Eviction(ttl_steps=5))
    for step in range(3):
        table.push([1], ones([1]), step=step)
    table.push([2], ones([2]), step=2)
    assert table.keys().tolist() == [1]
    assert table.shrink(step=7) == 0
    assert table.shrink(step=8) == 2  # the row, and the key that waited
    assert table.counters["evicted"] == 1
    assert table.counters["waiting"] == 0
    for step in (9, 10):
        table.push([1], ones([1]), step=step)
        assert len(table) == 0
    table.push([1], ones([1]), step=11)
    assert table.keys().tolist() == [1]


WIDE = Segment(dim=1, optimizer="sgd", learning_rate=1.0, initializer="zeros")
DEEP = Segment(dim=3, optimizer="adagrad", learning_rate=0.5, scale=1.0, seed=4, lazy=3)


@pytest.mark.parametrize("segments", [[WIDE, DEEP], [DEEP, WIDE]], ids=["first", "last"])
def test_wide_first_and_the_vector_later(segments: list[Segment], tmp_path: Path) -> None:
    wide_at = [0] if segments[0] is WIDE else [3]
    deep_at = [1, 2, 3] if segments[0] is WIDE else [0, 1, 2]
    table = LocalTable.create("t", 4, segments=segments)
    assert not table.pull([7]).any()
    small = 0
    for push in range(1, 3):
        table.push([7], ones([7], 4))
        row = table.pull([7])[0]
        assert row[wide_at] == -push
        assert not row[deep_at].any()
        small = table.nbytes
    table.push([7], ones([7], 4))  # it has earned the rest now, but not used it yet
    row = table.pull([7])[0]
    assert row[wide_at] == -3
    first = row[deep_at]
    assert first.all()
    assert abs(first).max() <= 1
    assert table.nbytes > small
    assert len(table) == 1
    table.push([7], ones([7], 4))
    row = table.pull([7])[0]
    np.testing.assert_allclose(row[deep_at], first - 0.5, rtol=1e-6)  # Adagrad's first step
    table.push([8], ones([8], 4))
    table.save(tmp_path / "ck")
    other = LocalTable.load_checkpoint(tmp_path / "ck")["t"]
    for each in (table, other):
        each.push([7, 8], ones([7, 8], 4))
    np.testing.assert_array_equal(other.pull([7, 8]), table.pull([7, 8]))
    assert not table.pull([8])[0, deep_at].any()


def test_a_vector_comes_with_the_score() -> None:
    table = LocalTable.create("t", 4, segments=[WIDE, DEEP], score=Score(non_click=0.25, click=1.0))
    table.push([1, 2], ones([1, 2], 4), shows=[11, 3], clicks=[0, 3])  # 2.75 and 3
    assert table.pull([1, 2])[:, 1:].any(axis=1).tolist() == [False, True]
    table.push([1], ones([1], 4), shows=[1])
    assert table.pull([1])[:, 1:].any()


def test_many_lazy_rows_keep_their_own_vectors() -> None:
    table = LocalTable.create("t", 4, segments=[WIDE, DEEP])
    rng = np.random.default_rng(0)
    seen = np.zeros(3000, np.int64)
    for _ in range(10):
        keys = rng.zipf(1.3, 4000) % 3000
        table.push(keys, np.zeros((4000, 4), np.float32))
        np.add.at(seen, keys, 1)
    rows = table.pull(np.arange(3000))
    np.testing.assert_array_equal(rows[:, 1:].any(axis=1), seen >= 3)
    full = rows[seen >= 3, 1:]
    assert len(np.unique(full, axis=0)) == len(full)
    # The same vectors as in a table that had them from the start.
    eager = LocalTable.create("t", 4, segments=[WIDE, Segment(dim=3, scale=1.0, seed=4)])
    np.testing.assert_array_equal(full, eager.pull(np.flatnonzero(seen >= 3))[:, 1:])


def test_a_large_filter_takes_memory_as_keys_are_counted() -> None:
    """Of one for 2**31 keys, some 3 GB, an empty table takes next to nothing."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    table = make("bloom", 2, dim=1, capacity=1 << 31, false_positive=0.5)
    keys = np.arange(100)
    for rows in (0, 100):
        table.push(keys, np.ones((100, 1), np.float32))
        assert len(table) == rows
    assert resident() - before < 256 << 20
