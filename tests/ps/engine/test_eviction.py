"""Which rows a shrink removes, and that what comes after is as if they had never been."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import LocalTable, ParameterClient
from ps.engine import _native as native
from ps.table.rules import Admission, Eviction, Score
from ps.table.spec import make_table
from tests.waiting import wait_until

SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "scale": 1.0}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.1, "scale": 1.0}


def ones(keys: Any, dim: int = 2) -> NDArray[np.float32]:
    return np.ones((*np.shape(keys), dim), np.float32)


def held(table: LocalTable) -> list[int]:
    return sorted(table.keys().tolist())


# Rows in memory, and rows that lie on disk.
@pytest.fixture(params=[0, 1 << 16], ids=["memory", "disk"])
def tier(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"memory_bytes": request.param} if request.param else {}


def make(eviction: Eviction, tier: dict[str, Any], **options: Any) -> LocalTable:
    table = LocalTable.create("t", 2, eviction=eviction, **SGD | tier | options)
    if tier:  # 64 KiB do not hold these, so that the rows of a test are on disk with them
        crowd = np.arange(10_000, 16_000)
        table.push(crowd, ones(crowd), kind="assign", time_s=2**31, step=2**31)
        assert table.counters["disk_rows"] > 3000
    return table


def few(table: LocalTable) -> list[int]:
    """The keys of the test, without the crowd."""
    return [k for k in held(table) if k < 10_000]


def test_no_rule_removes_nothing() -> None:
    table = LocalTable.create("t", 2, **SGD)
    table.push([1, 2], ones([1, 2]), time_s=1)
    assert table.shrink(time_s=2**31, step=2**31) == 0
    assert held(table) == [1, 2]


def test_ttl_seconds(tier: dict[str, Any]) -> None:
    table = make(Eviction(ttl_s=100), tier)
    for key in range(5):
        table.push([key], ones([key]), time_s=1000 + 10 * key)
    table.push([0], ones([0]), time_s=1045)
    table.pull([1])  # reading does not keep a row
    assert table.shrink(time_s=1110) == 0  # 100 seconds are not more than 100
    assert table.shrink(time_s=1111) == 1
    assert few(table) == [0, 2, 3, 4]
    assert table.shrink(time_s=1141) == 3
    assert few(table) == [0]
    assert table.counters["evicted"] == 4
    assert table.shrink(time_s=3) == 0  # a clock that went back


def test_ttl_steps(tier: dict[str, Any]) -> None:
    table = make(Eviction(ttl_steps=10), tier)
    for key in range(5):
        table.push([key], ones([key]), step=key)
    table.push([0], ones([0]), kind="add", step=5)
    assert table.shrink(step=11) == 0
    assert table.shrink(step=13) == 2
    assert few(table) == [0, 3, 4]


def test_small_norms(tier: dict[str, Any]) -> None:
    table = make(Eviction(min_norm=5.0), tier)
    if tier:  # whose crowd has a norm of 1.4
        assert table.shrink() == 6000
    rows = np.array([[3, 4], [3, 3.99], [-5, 0], [0, 0], [0, -4.9]], np.float32)
    table.push(np.arange(5), rows, kind="assign")
    assert table.shrink() == 3
    assert held(table) == [0, 2]
    table.push([0], np.array([[1, 0]], np.float32))
    assert table.shrink() == 1
    assert held(table) == [2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_small_norms_of_short_rows(dtype: str) -> None:
    table = LocalTable.create("t", 2, dtype=dtype, eviction=Eviction(min_norm=5.0), **SGD)
    table.push([1, 2], np.array([[3, 4.5], [3, 3]], np.float32), kind="assign")
    assert table.shrink() == 1
    assert held(table) == [1]


def test_scores_decay_and_then_fall_short(tier: dict[str, Any]) -> None:
    """score = non_click * (shows - clicks) + click * clicks, times decay at every shrink."""
    score = Score(non_click=0.25, click=2.0, decay=0.5)
    table = make(Eviction(min_score=1.0), tier, score=score)
    shows, clicks = np.float32([8, 7.9, 2, 1, 3]), np.float32([0, 0, 1, 1, 0])
    if tier:
        table.shrink()  # the crowd, at a score of 0.25
    assert len(table) == 0
    table.push(np.arange(5), ones(range(5)), shows=shows, clicks=clicks)
    points = 0.25 * (shows - clicks) + 2 * clicks
    assert points.tolist() == pytest.approx([2, 1.975, 2.25, 2, 0.75])
    assert table.shrink(decay=False) == 1
    assert held(table) == [0, 1, 2, 3]
    assert table.shrink() == 1  # they decay first: 1, 0.9875, 1.125, 1
    assert held(table) == [0, 2, 3]
    table.push([0], ones([0]), shows=[4], clicks=[0])  # 1 + 1
    assert table.shrink() == 2  # 1, 0.5625, 0.5
    assert held(table) == [0]
    assert table.shrink() == 1


def test_a_decay_by_formula_over_many_shrinks() -> None:
    """After n shrinks a key of s shows scores non_click * s * decay**n."""
    score = Score(non_click=0.1, click=1.0, decay=0.98)
    table = LocalTable.create("t", 1, eviction=Eviction(min_score=0.5), score=score, **SGD)
    shows = np.linspace(5, 60, 300).astype(np.float32)
    table.push(np.arange(300), ones(range(300), 1), shows=shows)
    for n in range(1, 100):
        table.shrink()
        left = 0.1 * shows * 0.98**n
        clear = abs(left - 0.5) > 1e-4  # float32 may round the rest either way
        expected = np.flatnonzero((left >= 0.5) & clear)
        got = set(held(table))
        assert set(expected.tolist()) <= got
        assert not got & set(np.flatnonzero((left < 0.5) & clear).tolist())
    assert 100 < len(table) < 150


@pytest.mark.parametrize("order", ["lfu", "lru"])
def test_the_most_rows(order: str, tier: dict[str, Any]) -> None:
    """Nothing goes while there are no more; then exactly as many as are too many."""
    table = LocalTable.create("t", 2, eviction=Eviction(max_rows=500, order=order), **SGD | tier)
    keys = np.arange(500)
    table.push(keys, ones(keys), time_s=10)
    assert table.shrink() == 0
    keys = np.arange(4000)
    table.push(keys, ones(keys), time_s=20)
    table.push(keys[:1000], ones(keys[:1000]), time_s=30)  # three times the first 500
    table.push(keys[:1000], ones(keys[:1000]), time_s=30)
    table.push(keys[3000:], ones(keys[3000:]), time_s=40)  # twice; the newest
    assert table.shrink() == 3500
    left = np.array(held(table))
    assert len(left) == len(table) == 500
    if order == "lfu":
        assert left.tolist() == list(range(500))
    else:
        assert (left >= 3000).all()
    assert table.counters["evicted"] == 3500
    assert table.shrink() == 0


def test_equally_good_rows_go_alike_everywhere() -> None:
    """The same table shrinks to the same rows, as a replica or a log that is replayed must."""
    tables = [LocalTable.create("t", 2, eviction=Eviction(max_rows=100), **SGD) for _ in range(2)]
    keys = np.arange(1000)
    tables[0].push(keys, ones(keys))
    for begin in range(0, 1000, 50):
        tables[1].push(keys[::-1][begin : begin + 50], ones(range(50)))
    for table in tables:
        assert table.shrink() == 900
    assert held(tables[0]) == held(tables[1])


def test_an_evicted_row_begins_anew(tier: dict[str, Any]) -> None:
    """Its first value follows from seed and key; its optimizer's state is forgotten."""
    table = make(Eviction(ttl_steps=1), tier, **ADAM)
    fresh = LocalTable.create("t", 2, **ADAM)
    keys = [1, 2**63, 2**64 - 1]
    rows = np.uint64(keys)
    first = table.pull(rows)
    grads = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
    for step in range(5):
        table.push(rows, grads * (step - 2.5), step=step)
    assert (table.pull(rows) != first).all()
    assert table.shrink(step=10) == 3
    assert few(table) == []
    np.testing.assert_array_equal(table.pull(rows), first)
    table.push(rows, grads, step=11)
    fresh.push(rows, grads)
    np.testing.assert_array_equal(table.pull(rows), fresh.pull(rows))


def test_evicted_rows_leave_room() -> None:
    table = LocalTable.create("t", 16, eviction=Eviction(ttl_steps=1), **SGD)
    size = 0
    for step in range(0, 40, 4):
        keys = np.arange(3000) + 10_000 * step
        table.push(keys, ones(keys, 16), step=step)
        assert table.shrink(step=step + 3) == 3000
        named = 16 * table.counters["evicted"]  # removed keys are remembered for deltas
        size = size or table.nbytes - named
        assert table.nbytes - named < 1.5 * size
    assert table.counters["evicted"] == 30_000


def test_a_checkpoint_keeps_what_decides(tmp_path: Path) -> None:
    rules = Eviction(ttl_s=100, min_score=1.0)
    table = LocalTable.create("t", 2, eviction=rules, score=Score(non_click=1, decay=0.5), **SGD)
    table.push([1, 2, 3], ones(range(3)), time_s=1000, shows=[8, 2, 8])
    table.push([3], ones([3]), time_s=2000, shows=[1])
    table.save(tmp_path / "ck")
    other = LocalTable.load_checkpoint(tmp_path / "ck")["t"]
    for each in (table, other):
        assert each.shrink(time_s=1050) == 0  # 4, 1, 4.5
        assert each.shrink(time_s=1051) == 1
        assert each.shrink(time_s=1101) == 1
        assert held(each) == [3]


def test_rules_work_together_with_admission() -> None:
    rules = Eviction(max_rows=50, min_norm=0.75)
    table = LocalTable.create(
        "t", 2, admission=Admission(kind="count", threshold=2), eviction=rules, **SGD
    )
    keys = np.arange(200)
    table.push(keys, ones(keys))
    assert table.shrink() == 0  # these only wait
    table.push(keys[:100], np.zeros((100, 2), np.float32), kind="add")
    table.push(keys[:40], np.zeros((40, 2), np.float32), kind="assign")
    long = np.linalg.norm(LocalTable.create("t", 2, **SGD).pull(keys[40:100]), axis=1) >= 0.75
    kept = keys[40:100][long]  # those assigned zeros are too small as well
    assert 10 < len(kept) < 50
    assert table.shrink() == 100 - len(kept)
    assert held(table) == kept.tolist()
    assert table.counters["waiting"] == 100


def test_a_shard_shrinks_by_itself(client: ParameterClient) -> None:
    client.create_table("crowded", 2, eviction=Eviction(max_rows=100), **SGD)
    hot = np.arange(30)
    for _ in range(20):
        client.push("crowded", hot, ones(hot))
    for begin in range(100, 3000, 100):
        client.push("crowded", hot, ones(hot))
        client.push("crowded", np.arange(begin, begin + 100), ones(range(100)))

    def tables() -> list[Any]:
        return [t for s in client.stats() for t in s.tables if t.name == "crowded"]

    wait_until(lambda: max(t.rows for t in tables()) <= 100, "all shards shrink", 20.0)
    assert sum(t.evicted for t in tables()) > 2000
    assert set(hot.tolist()) <= set(client.keys("crowded", 1000).tolist())
    before = sum(t.rows for t in tables())
    assert client.shrink("crowded") == 0
    assert sum(t.rows for t in tables()) == before


def test_a_client_shrinks_all_shards(client: ParameterClient) -> None:
    client.create_table("old", 2, eviction=Eviction(ttl_steps=10), **SGD)
    client.push("old", np.arange(300), ones(range(300)), step=1)
    client.push("old", np.arange(100), ones(range(100)), step=5)
    assert client.shrink("old", step=11) == 0
    assert client.shrink("old", step=12) == 200
    assert sorted(client.keys("old", 1000).tolist()) == list(range(100))
    first = LocalTable.create("old", 2, **SGD).pull(np.arange(300))
    np.testing.assert_array_equal(client.pull("old", np.arange(100, 300)), first[100:])


def test_a_save_under_way_has_what_there_was_before_a_shrink(tier: dict[str, Any]) -> None:
    """Rows that go meanwhile, and shows and clicks before they decay."""
    rules = Eviction(ttl_steps=5, min_score=2.0)
    score = Score(non_click=1.0, click=1.0, decay=0.5)
    table = make(rules, tier, score=score)
    twin = make(rules, tier, score=score)
    keys = np.arange(3000)
    for each in (table, twin):
        each.push(keys, ones(keys), step=2**31 + 1, shows=1 + keys % 16)
    snapshot = table._table.snapshot(since=0, values=False, min_score=0.0, buckets=None)
    copy = make_table(table.spec, tempfile.gettempdir())
    for _ in range(7):
        copy.absorb(snapshot.next(), None)
    table.shrink(step=2**31 + 3)
    table.shrink(step=2**31 + 3)
    while (block := snapshot.next()) is not None:
        copy.absorb(block, None)
    assert sorted(copy.keys(1 << 20).tolist()) == held(twin)
    saved = LocalTable(table.spec, copy)
    for _ in range(2):
        assert saved.shrink(step=2**31 + 3) == twin.shrink(step=2**31 + 3) > 0
        assert held(saved) == held(twin)
    assert held(table) == held(saved)


def test_a_push_that_shrinks_some_buckets_leaves_the_others() -> None:
    table = LocalTable.create("t", 2, eviction=Eviction(ttl_steps=5), **SGD)
    keys = np.arange(2000, dtype=np.uint64)
    table.push(keys, ones(keys), step=1)
    some = np.zeros(native.BUCKETS, np.uint8)
    some[::3] = 1
    gone = some[native.buckets_of(keys)].astype(bool)
    assert 500 < gone.sum() < 800
    how: dict[str, Any] = {"kind": "", "rate": 1.0, "nonce": 0, "time_s": 1, "usage": None}
    table._table.push(keys[:100], 8, ones(keys[:100]), step=7, shrink=some, **how)
    gone[:100] = False
    assert held(table) == keys[~gone].tolist()
    table._table.push(b"", 8, b"", step=9, shrink=some | 1, turn=table._table.take_turn(), **how)
    assert held(table) == keys[:100].tolist()


# Reads absent keys of a table whose rows come and go: all parts of its index have been full.
_CHURN = """
import sys
import numpy as np
from ps import Eviction, LocalTable

rng = np.random.default_rng(0)
table = LocalTable.create(
    "t", 1, optimizer="sgd", memory_bytes=int(sys.argv[1]), eviction=Eviction(ttl_steps=1)
)
for step in range(300):
    keys = rng.integers(0, 2**63, 1000)
    table.push(keys, np.ones((1000, 1), np.float32), step=step)
    if step % 2:
        table.shrink(step=step + 1)
    table.pull(rng.integers(0, 2**63, 4000), read_only=True)
print(len(table))
"""


@pytest.mark.parametrize("memory_bytes", [0, 1 << 16])
def test_a_key_that_is_not_there_is_looked_for_once_around(memory_bytes: int) -> None:
    command = [sys.executable, "-c", _CHURN, str(memory_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1000\n"
