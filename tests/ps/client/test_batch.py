"""The client's batch operations and the window of applied pushes, against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.engine import _native
from ps.table.buckets import default_route

key_lists = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), max_size=400).map(
    lambda v: np.array(v, np.uint64)
)


@settings(max_examples=100)
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


@settings(max_examples=60)
@given(key_lists, st.integers(1, 1024))
def test_partition_covers_and_is_stable(keys: np.ndarray, shards: int) -> None:
    parts = _native.partition(keys, default_route(shards), shards)
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
    sizes = [len(k) for k, _ in _native.partition(keys, default_route(7), 7)]
    assert max(sizes) < 1.1 * min(sizes)
    # A checkpoint depends on this mapping: keys 0-15 over 4 shards.
    owner = np.empty(16, int)
    for shard, (_, where) in enumerate(_native.partition(keys[:16], default_route(4), 4)):
        owner[where] = shard
    assert owner.tolist() == [1, 0, 2, 3, 2, 3, 0, 1, 2, 0, 3, 0, 3, 2, 2, 0]


def test_partition_follows_the_route() -> None:
    keys = np.random.default_rng(2).integers(0, 2**64, 5000, dtype=np.uint64)
    route = np.random.default_rng(3).integers(0, 5, _native.BUCKETS).astype(np.uint16)
    owner = route[_native.buckets_of(keys)]
    for shard, (part, where) in enumerate(_native.partition(keys, route, 5)):
        np.testing.assert_array_equal(where, np.flatnonzero(owner == shard))
        np.testing.assert_array_equal(part, keys[where])
    with pytest.raises(ValueError, match="a shard that is not there"):
        _native.partition(keys, route, 4)


@settings(max_examples=60)
@given(key_lists, st.integers(1, 1024))
def test_a_plan_has_each_key_once_by_shard(keys: np.ndarray, shards: int) -> None:
    route = default_route(shards)
    planned, begin, inverse = _native.plan(keys, route, shards)
    assert sorted(planned.tolist()) == sorted(set(keys.tolist()))
    np.testing.assert_array_equal(planned[inverse], keys)
    owner = route[_native.buckets_of(planned)]
    assert begin == np.searchsorted(owner, np.arange(shards + 1)).tolist()
    assert (np.diff(owner.astype(int)) >= 0).all()


def test_a_plan_of_many_follows_the_route() -> None:
    rng = np.random.default_rng(4)
    keys = rng.choice(rng.integers(0, 2**64, 60_000, dtype=np.uint64), 100_000)
    route = rng.integers(0, 3, _native.BUCKETS).astype(np.uint16)
    planned, begin, inverse = _native.plan(keys, route, 3)
    np.testing.assert_array_equal(planned[inverse], keys)
    assert len(planned) == len(np.unique(keys)) == begin[-1]
    for shard in range(3):
        part = planned[begin[shard] : begin[shard + 1]]
        assert (route[_native.buckets_of(part)] == shard).all()
    with pytest.raises(ValueError, match="a shard that is not there"):
        _native.plan(keys, route, 2)


def test_gather_and_segment_sum() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 3)).astype(np.float32)
    order = rng.permutation(50)
    inverse = rng.integers(0, 50, 200)
    halves = (order[:20].copy(), order[20:].copy())
    for dtype, as_sent in (("float32", np.float32), ("float16", np.float16)):
        sent = rows.astype(as_sent)
        parts = [(np.ascontiguousarray(sent[at]), at) for at in halves]
        expected = sent.astype(np.float32)
        np.testing.assert_array_equal(_native.gather(parts, 50, None, 3, dtype), expected)
        np.testing.assert_array_equal(
            _native.gather(parts, 50, inverse, 3, dtype), expected[inverse]
        )
        whole = [(np.ascontiguousarray(sent), None)]
        ends = [(np.ascontiguousarray(sent[:20]), None), (np.ascontiguousarray(sent[20:]), None)]
        for parts_in_order in (whole, ends):
            made = _native.gather(parts_in_order, 50, inverse, 3, dtype)
            np.testing.assert_array_equal(made, expected[inverse])
            made = _native.gather(parts_in_order, 50, None, 3, dtype)
            np.testing.assert_array_equal(made, expected)
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    cut = (bits.astype(np.uint32) << 16).view(np.float32)
    parts = [(np.ascontiguousarray(bits[at]), at) for at in halves]
    np.testing.assert_array_equal(_native.gather(parts, 50, inverse, 3, "bfloat16"), cut[inverse])
    grads = rng.standard_normal((200, 3)).astype(np.float32)
    total = np.zeros((50, 3), np.float32)
    np.add.at(total, inverse, grads)
    np.testing.assert_array_equal(_native.segment_sum(inverse, grads, 50, 3), total)


def test_bags_that_do_not_fit_are_refused() -> None:
    inverse, rows = np.array([0, 1, 1, 0]), np.zeros((2, 3), np.float32)
    for pooling in ("sum", "max"):
        pooled, picked = _native.pool(rows, inverse, None, 2, 3, pooling)
        assert pooled.shape == (2, 3)
        for length in (0, 3):
            with pytest.raises(ValueError, match=f"4 keys are no bags of {length}"):
                _native.pool(rows, inverse, None, length, 3, pooling)
        with pytest.raises(ValueError, match="not below 2"):
            _native.pool(rows, np.array([0, 2]), None, 2, 3, pooling)
        with pytest.raises(ValueError, match="not below 1"):
            _native.pool_grads(pooled, inverse, None, picked, 2, 1, 3, pooling)
        with pytest.raises(ValueError, match="there: 3 bytes, expected 4"):
            _native.pool(rows, inverse, np.ones(3, bool), 2, 3, pooling)
        with pytest.raises(ValueError, match="gradients: 12 bytes, expected 24"):
            _native.pool_grads(pooled[:1], inverse, None, picked, 2, 2, 3, pooling)
    beyond = np.full((2, 3), 2, np.int32)
    with pytest.raises(ValueError, match="picked: a row is not below 2"):
        _native.pool_grads(pooled, inverse, None, beyond, 2, 2, 3, "max")
    with pytest.raises(ValueError, match="unknown pooling 'avg'"):
        _native.pool(rows, inverse, None, 2, 3, "avg")


def test_sizes_and_indices_are_checked() -> None:
    i64 = np.array([0, 5], np.int64)
    f32 = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="not below 2"):
        _native.gather([(f32, i64)], 2, None, 3, "float32")
    with pytest.raises(ValueError, match="not below 5"):
        _native.segment_sum(i64, f32, 5, 3)
    with pytest.raises(ValueError, match="not below 5"):
        _native.segment_sum(np.array([0, -1]), f32, 5, 3)
    with pytest.raises(ValueError, match="do not cover"):
        _native.gather([(f32, np.array([1, 1]))], 2, None, 3, "float32")
    with pytest.raises(ValueError, match="do not cover"):
        _native.gather([(f32, None)], 3, None, 3, "float32")
    with pytest.raises(ValueError, match="not below 2"):
        _native.gather([(f32, None)], 2, i64, 3, "float32")
    with pytest.raises(ValueError, match="rows: 24 bytes, expected 12"):
        _native.gather([(f32, np.array([1, 0]))], 2, None, 3, "float16")
    with pytest.raises(ValueError, match="unknown dtype 'float8'"):
        _native.gather([(f32, np.array([1, 0]))], 2, None, 3, "float8")
    with pytest.raises(ValueError, match="gradients: 24 bytes, expected 48"):
        _native.segment_sum(i64, f32, 6, 6)
    with pytest.raises(ValueError, match="whole number"):
        _native.unique(b"1234567")
    with pytest.raises(ValueError, match="route: 16 bytes, expected 2048"):
        _native.partition(i64, i64, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        _native.unique(np.arange(10)[::2])


@pytest.mark.parametrize("key_bytes", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_push_on_the_wire(key_bytes: int, dtype: str, with_usage: bool) -> None:
    """Keys, the chosen rows of the gradients, then shows and clicks of the same rows."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, 7, dtype=np.uint64)
    values = rng.standard_normal((20, 3)).astype(np.float32)
    positions = rng.permutation(20)[:7].astype(np.int64)
    usage = rng.random((2, 20)).astype(np.float32) if with_usage else None
    made = _native.push_message(b"head", keys, values, positions, 3, dtype, key_bytes, usage)
    body = bytearray(len(made) - 4)
    _native.push_into(body, keys, values, positions, 3, dtype, key_bytes, usage)
    assert made == b"head" + body
    at = 7 * key_bytes
    assert np.frombuffer(body[:at], f"<u{key_bytes}").tolist() == keys.tolist()
    end = at + 7 * 3 * (4 if dtype == "float32" else 2)
    got = _native.decode_values(bytes(body[at:end]), dtype).reshape(7, 3)
    tolerance = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(got, values[positions], rtol=tolerance)
    rest = np.frombuffer(body[end:], np.float32)
    expected = usage[:, positions].ravel() if usage is not None else np.empty(0)
    np.testing.assert_array_equal(rest, expected)


def test_narrow_keys() -> None:
    keys = np.array([0, 1, 2**31, 2**32 - 1], np.uint64)
    assert _native.narrow_keys(keys) == keys.astype("<u4").tobytes()
    assert _native.narrow_keys(keys[:0]) == b""


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9000), max_size=300))
def test_window_applies_each_sequence_once(sequences: list[int]) -> None:
    window = _native.Window()
    applied: set[int] = set()
    for sequence in sequences:
        verdict = window.mark("c", 1, sequence)
        if sequence + _native.WINDOW <= max(applied, default=0):
            assert verdict == 2
        else:
            assert verdict == (1 if sequence in applied else 0)
            applied.add(sequence)
        moved = _native.Window()
        moved.merge(window.export())
        window = moved


def test_window_fences_earlier_epochs() -> None:
    window = _native.Window()
    verdicts = [
        window.mark(client, epoch, sequence)
        for client, epoch, sequence in [
            ("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("a", 2, 1), ("a", 1, 2), ("a", 2, 2)
        ]
    ]  # fmt: skip
    assert verdicts == [0, 1, 0, 0, 3, 0]


def test_an_unmarked_push_may_come_again() -> None:
    window = _native.Window()
    assert [window.mark("c", 1, s) for s in (1, 2, 3)] == [0, 0, 0]
    window.unmark("c", 1, 2)
    window.unmark("c", 7, 3)  # of an epoch that is not the present one
    window.unmark("nobody", 1, 3)
    assert [window.mark("c", 1, s) for s in (1, 2, 3)] == [1, 0, 1]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(0, 6000))))
def test_merged_windows_know_what_either_knew(marks: list[tuple[int, int, int]]) -> None:
    windows = (_native.Window(), _native.Window())
    known: list[dict[int, set[int]]] = [{}, {}]
    for which, epoch, sequence in marks:
        if windows[which].mark("c", epoch, sequence) == 0:
            known[which].setdefault(epoch, set()).add(sequence)
    windows[0].merge(windows[1].export())
    newest = max((e for k in known for e in k), default=1)
    applied = set().union(*(k.get(newest, set()) for k in known))
    for sequence in sorted(applied):
        expected = 2 if sequence + _native.WINDOW <= max(applied) else 1
        assert windows[0].mark("c", newest, sequence) == expected
