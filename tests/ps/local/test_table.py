"""Tables in process: first values, large batches, segments, what is refused."""

from typing import Any

import numpy as np
import pytest

from ps import LocalTable, TableError
from ps.table.rules import Admission, Eviction, Score, Segment


def test_large_batches_match_small_ones() -> None:
    """Large ones are shared out among threads."""
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 30_000, 50_000)
    grads = rng.integers(-8, 9, (50_000, 4)).astype(np.float32)
    options: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
    a, b = LocalTable.create("t", 4, **options), LocalTable.create("t", 4, **options)
    a.push(keys, grads)
    for begin in range(0, 50_000, 5_000):
        b.push(keys[begin : begin + 5_000], grads[begin : begin + 5_000])
    expected = np.zeros((30_000, 4), np.float32)
    np.add.at(expected, keys, -grads)
    np.testing.assert_array_equal(a.pull(np.arange(30_000)), expected)
    np.testing.assert_array_equal(b.pull(np.arange(30_000)), expected)
    assert sorted(a.keys().tolist()) == np.unique(keys).tolist()


def test_first_values_depend_on_seed_and_key_alone() -> None:
    keys = np.arange(20_000)
    tables = [
        LocalTable.create("t", 16, initializer="normal", scale=0.5, seed=s) for s in (1, 1, 2)
    ]
    a = tables[0].pull(keys)
    b = np.concatenate([tables[1].pull(keys[::-1][i : i + 999]) for i in range(0, 20_000, 999)])
    np.testing.assert_array_equal(a, b[::-1])
    assert not np.isclose(a, tables[2].pull(keys)).all(axis=1).any()
    assert abs(a.mean()) < 0.005
    assert abs(a.std() - 0.5) < 0.005
    u = LocalTable.create("t", 16, initializer="uniform", scale=2.0).pull(keys)
    assert u.min() >= -2
    assert u.max() < 2
    assert abs(u.mean()) < 0.02
    assert abs(u.std() - 4 / 12**0.5) < 0.02
    assert abs(np.corrcoef(u.T) - np.eye(16)).max() < 0.05
    assert not LocalTable.create("t", 16, initializer="zeros").pull(keys).any()


def test_segments_train_as_tables_of_their_own() -> None:
    segments = [
        Segment(dim=3, optimizer="sgd", learning_rate=0.5, initializer="zeros"),
        Segment(dim=1, optimizer="ftrl", learning_rate=0.1, hyperparameters={"l1": 0.1}),
        Segment(dim=4, optimizer="adam", learning_rate=0.01, initializer="normal", seed=3),
    ]
    table = LocalTable.create("t", 8, segments=segments)
    keys = np.arange(300)
    first = table.pull(keys)
    assert not first[:, :3].any()
    parts = [
        LocalTable.create(
            "p",
            s.dim,
            optimizer=s.optimizer,
            learning_rate=s.learning_rate,
            **dict(s.hyperparameters),
        )
        for s in segments
    ]
    columns = (slice(0, 3), slice(3, 4), slice(4, 8))
    for part, at in zip(parts, columns, strict=True):
        part.push(keys, np.ascontiguousarray(first[:, at]), kind="assign")
    rng = np.random.default_rng(0)
    for _ in range(5):
        some = rng.integers(0, 300, 500)
        grads = rng.standard_normal((500, 8)).astype(np.float32)
        table.push(some, grads)
        for part, at in zip(parts, columns, strict=True):
            part.push(some, np.ascontiguousarray(grads[:, at]))
    for part, at in zip(parts, columns, strict=True):
        np.testing.assert_array_equal(table.pull(keys)[:, at], part.pull(keys))


def test_equal_segments_begin_unlike() -> None:
    halves = [Segment(dim=4, seed=1, scale=1.0)] * 2
    rows = LocalTable.create("t", 8, segments=halves).pull(np.arange(100))
    assert not np.isclose(rows[:, :4], rows[:, 4:]).all(axis=1).any()
    assert abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.5


def test_no_finite_sum_makes_a_row_infinite() -> None:
    huge = np.full((3, 2), 3e38, np.float32)
    table = LocalTable.create("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    table.push([1, 1, 1], huge)
    table.push([2, 2, 2], huge, kind="add")
    table.push([2], huge[:1], kind="add")
    highest = np.finfo(np.float32).max
    np.testing.assert_array_equal(table.pull([1, 2]), [[-highest] * 2, [highest] * 2])


def test_shows_and_clicks_are_checked() -> None:
    plain = LocalTable.create("plain", 2)
    grads = np.zeros((2, 2), np.float32)
    with pytest.raises(TableError, match="'plain': shows and clicks given; expected a table with"):
        plain.push([1, 2], grads, shows=[1, 1])
    table = LocalTable.create("scored", 2, score=Score())
    with pytest.raises(TableError, match="clicks has 3 values; expected 2"):
        table.push([1, 2], grads, clicks=[1, 1, 1])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TableError, match="shows: expected finite numbers >= 0"):
            table.push([1, 2], grads, shows=[1, bad])
    assert len(table) == 0


def test_rows_on_disk_need_a_place(tmp_path: Any) -> None:
    with pytest.raises((TableError, RuntimeError), match="nowhere"):
        LocalTable.create("t", 2, memory_bytes=1 << 20, directory=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adagard"}, "unknown optimizer 'adagard'.*did you mean 'adagrad'"),
        ({"initializer": "gauss"}, "unknown initializer 'gauss'; expected zeros"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1; expected a finite number >= 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"optimizer": "sgd", "beta1": 0.9}, "beta1=0.9 does not belong to sgd"),
        ({"optimizer": "adam", "beta3": 1.0}, "beta3=1.0 does not belong.*did you mean 'beta2'"),
        ({"optimizer": "adam", "beta2": 1.0}, "beta2=1.0; expected 0 <= beta2 < 1"),
        ({"optimizer": "ftrl", "trust_ratio": True}, "trust_ratio=True does not belong to ftrl"),
        ({"optimizer": "ftrl", "learning_rate": 0.0}, "learning_rate=0; ftrl divides by it"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616; expected 0 to"),
        ({"dim": 0}, "dim=0; expected an integer of 1"),
        ({"dim": 2.0}, "dim=2.0"),
        ({"dim": True}, "dim=True"),
        ({"dim": 16385}, "dim=16385; expected an integer of 1 to 16384"),
        ({"name": "../x"}, "table name '../x'"),
        ({"name": ""}, "table name ''"),
        ({"name": "a" * 129}, "expected 1 to 128 letters"),
        ({"dtype": "float8"}, "unknown dtype 'float8'; expected float32"),
        ({"durability": "raid"}, "unknown durability 'raid'; expected none"),
        ({"memory_bytes": 1000}, "memory_bytes=1000; expected 0 or at least 65536"),
        ({"segments": [Segment(dim=3)]}, "dim=4; its segments have 3 together"),
        ({"segments": [Segment(dim=4, lazy=2)]}, "all segments are lazy"),
        ({"segments": [Segment(dim=4, optimizer="lion")]}, "unknown optimizer 'lion'"),
        ({"segments": [Segment(dim=4, hyperparameters={"beta1": 1})]}, "does not belong to ada"),
        (
            {"segments": [Segment(dim=2), *(Segment(dim=1, lazy=n) for n in (1, 2))]},
            "lazy segments with several thresholds",
        ),
        ({"admission": Admission(kind="luck", threshold=1)}, "unknown admission 'luck'"),
        ({"admission": Admission(kind="count", threshold=0)}, "threshold=0.0; expected above 0"),
        ({"admission": Admission(kind="bloom", threshold=256)}, "expected above 0, at most 255"),
        ({"admission": Admission(kind="probability", threshold=1.5)}, "at most 1"),
        ({"admission": Admission(kind="score", threshold=1)}, "admission by score needs a score"),
        (
            {"admission": Admission(kind="bloom", threshold=2, false_positive=1.0)},
            "false_positive=1.0; expected",
        ),
        ({"admission": Admission(kind="count", threshold=2, reads="ones")}, "unknown reads 'ones'"),
        ({"eviction": Eviction(order="fifo")}, "unknown order 'fifo'; expected lfu, lru"),
        ({"eviction": Eviction(min_score=1.0)}, "min_score=1.0 needs a score"),
        ({"eviction": Eviction(min_norm=-1.0)}, "min_norm=-1.0; expected a finite number >= 0"),
        ({"score": Score(decay=0.0)}, "decay=0.0; expected 0 < decay <= 1"),
        ({"score": Score(non_click=0, click=0)}, "is always zero"),
    ],
)
def test_bad_specs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        LocalTable.create(**({"name": "t", "dim": 4} | options))
