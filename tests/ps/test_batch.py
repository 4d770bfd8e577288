"""The client's batch operations and the window of applied pushes, against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps import _native

key_lists = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), max_size=400).map(
    lambda v: np.array(v, np.uint64)
)


@settings(max_examples=100, deadline=None)
@given(key_lists)
def test_unique_keeps_first_occurrences(keys: np.ndarray) -> None:
    unique, inverse = _native.unique(keys)
    assert unique.tolist() == list(dict.fromkeys(keys.tolist()))
    np.testing.assert_array_equal(unique[inverse], keys)


def test_unique_of_many() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, 200_000, dtype=np.uint64)
    unique, inverse = _native.unique(np.concatenate([keys, keys]))
    assert len(unique) == len(np.unique(keys))
    np.testing.assert_array_equal(unique[inverse][200_000:], keys)


@settings(max_examples=60, deadline=None)
@given(key_lists, st.integers(1, 1024))
def test_partition_covers_and_is_stable(keys: np.ndarray, shards: int) -> None:
    parts = _native.partition(keys, shards)
    assert len(parts) == shards
    positions = np.concatenate([p for _, p in parts])
    assert sorted(positions.tolist()) == list(range(len(keys)))
    owner: dict[int, int] = {}
    for shard, (part, where) in enumerate(parts):
        np.testing.assert_array_equal(keys[where], part)
        for key in part.tolist():
            assert owner.setdefault(key, shard) == shard


def test_partition_is_even_and_fixed() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    sizes = [len(k) for k, _ in _native.partition(keys, 7)]
    assert max(sizes) < 1.1 * min(sizes)
    # A checkpoint depends on this mapping: keys 0-15 over 4 shards.
    owner = np.empty(16, int)
    for shard, (_, where) in enumerate(_native.partition(keys[:16], 4)):
        owner[where] = shard
    assert owner.tolist() == [1, 0, 2, 3, 2, 3, 0, 1, 2, 0, 3, 0, 3, 2, 2, 0]


def test_gather_and_segment_sum() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 3)).astype(np.float32)
    order = rng.permutation(50)
    inverse = rng.integers(0, 50, 200)
    parts = [(rows[order[:20]], order[:20].copy()), (rows[order[20:]], order[20:].copy())]
    np.testing.assert_array_equal(_native.gather(parts, 50, None, 3), rows)
    np.testing.assert_array_equal(_native.gather(parts, 50, inverse, 3), rows[inverse])
    grads = rng.standard_normal((200, 3)).astype(np.float32)
    expected = np.zeros((50, 3), np.float32)
    np.add.at(expected, inverse, grads)
    np.testing.assert_array_equal(_native.segment_sum(inverse, grads, 50, 3), expected)


def test_sizes_and_indices_are_checked() -> None:
    i64 = np.array([0, 5], np.int64)
    f32 = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="not below 2"):
        _native.gather([(f32, i64)], 2, None, 3)
    with pytest.raises(ValueError, match="not below 5"):
        _native.segment_sum(i64, f32, 5, 3)
    with pytest.raises(ValueError, match="not below 5"):
        _native.segment_sum(np.array([0, -1]), f32, 5, 3)
    with pytest.raises(ValueError, match="do not cover"):
        _native.gather([(f32, np.array([1, 1]))], 2, None, 3)
    with pytest.raises(ValueError, match="gradients: 24 bytes, expected 48"):
        _native.segment_sum(i64, f32, 6, 6)
    with pytest.raises(ValueError, match="whole number"):
        _native.unique(b"1234567")
    with pytest.raises(ValueError, match="shards"):
        _native.partition(i64, 0)
    with pytest.raises(ValueError, match="contiguous"):
        _native.unique(np.arange(10)[::2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9000), max_size=300))
def test_window_applies_each_sequence_once(sequences: list[int]) -> None:
    table = _native.Table(1, "sgd", 1, 0, 0, 0, 0, 0, "zeros", 0, 0)
    window = _native.Window()
    key, grad = np.zeros(1, np.uint64), np.full((1, 1), -1, np.float32)
    applied: set[int] = set()
    for sequence in sequences:
        verdict = table.push_once(window, "c", 1, sequence, key, grad)
        if sequence + _native.WINDOW <= max(applied, default=0):
            assert verdict == 2
        else:
            assert verdict == (1 if sequence in applied else 0)
            applied.add(sequence)
        moved = _native.Window()
        moved.restore(window.export())
        window = moved
    assert table.pull(key, True)[0, 0] == len(applied)


def test_window_fences_earlier_epochs() -> None:
    table = _native.Table(1, "sgd", 1, 0, 0, 0, 0, 0, "zeros", 0, 0)
    window = _native.Window()
    key, grad = np.zeros(1, np.uint64), np.ones((1, 1), np.float32)
    verdicts = [
        table.push_once(window, client, epoch, sequence, key, grad)
        for client, epoch, sequence in [
            ("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("a", 2, 1), ("a", 1, 2), ("a", 2, 2)
        ]
    ]  # fmt: skip
    assert verdicts == [0, 1, 0, 0, 3, 0]
