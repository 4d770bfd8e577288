"""Rows on disk: a table far larger than its memory is the same table."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import LocalTable, ParameterClient
from ps.engine import _native
from ps.table.rules import Admission, Eviction, Score, Segment
from tests.ps.crowded import crowded
from tests.waiting import wait_until

DIM = 80
BUDGET = 1 << 19
SHM = Path("/dev/shm")
KEYS = 17_000  # an index of 128 KiB and rows of 5 MiB at least
LIMIT = 1.15 * BUDGET
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
    "adagrad": {"optimizer": "adagrad", "learning_rate": 0.1},
    "short-rows": {"optimizer": "adagrad", "dtype": "float16"},
    "lazy-segments": {
        "segments": [Segment(dim=1), Segment(dim=DIM - 1, optimizer="adam", lazy=2)],
        "score": Score(non_click=1.0),
        "admission": Admission(kind="count", threshold=2),
    },
}


def batches(seed: int, count: int, size: int = 2000) -> list[tuple[Any, NDArray[np.float32]]]:
    """Skewed keys, so that some rows are hot, and gradients."""
    rng = np.random.default_rng(seed)
    skewed = (rng.pareto(0.7, (count, size)) * 20).astype(np.int64) % KEYS
    return [(keys, rng.standard_normal((size, DIM)).astype(np.float32)) for keys in skewed]


def fill(table: LocalTable) -> None:
    """Every key once."""
    keys = np.random.default_rng(7).permutation(KEYS)
    for begin in range(0, KEYS, 1000):
        some = keys[begin : begin + 1000]
        table.push(some, np.repeat(np.sin(some)[:, None], DIM, 1).astype(np.float32))


def flush(table: LocalTable) -> None:
    """Send the coldest rows to disk, as a shard does by itself."""
    table._table.demote()


@pytest.fixture(params=["past-pages", "through-pages"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where rows go: a folder of the disk, and one of memory, which has no way past its pages."""
    if request.param == "past-pages":
        yield str(tmp_path)
        return
    if not SHM.is_dir():
        pytest.skip(f"{SHM}: this system has no such folder")
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        yield folder


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_table_ten_times_its_memory_trains_to_the_same_rows(
    directory: str, options: dict[str, Any]
) -> None:
    tiered = LocalTable.create("t", DIM, directory=directory, memory_bytes=BUDGET, **options)
    plain = LocalTable.create("t", DIM, **options)
    for table in (tiered, plain):
        fill(table)
        fill(table)
    assert plain.nbytes > 10 * BUDGET
    highest = 0
    for keys, grads in batches(0, 30):
        np.testing.assert_array_equal(tiered.pull(keys), plain.pull(keys))
        for table in (tiered, plain):
            table.push(keys, grads)
        highest = max(highest, tiered.nbytes)
    every = np.arange(KEYS)
    np.testing.assert_array_equal(tiered.pull(every, read_only=True), plain.pull(every))
    np.testing.assert_array_equal(tiered.pull(every), plain.pull(every))
    assert max(highest, tiered.nbytes) < LIMIT
    assert sorted(tiered.keys().tolist()) == sorted(plain.keys().tolist())
    assert len(tiered) == len(plain)


def test_rows_that_others_change_while_they_are_read_are_read_again(directory: str) -> None:
    """Threads that push ones, pull, and bring rows into memory: each row has all of its ones."""
    keys, threads = 4000, 4
    table = LocalTable.create(
        "t",
        DIM,
        directory=directory,
        memory_bytes=BUDGET // 2,
        optimizer="sgd",
        learning_rate=1.0,
        initializer="zeros",
    )
    table.push(np.arange(keys), np.zeros((keys, DIM), np.float32))

    def work(seed: int) -> NDArray[np.int64]:
        rng, given = np.random.default_rng(seed), np.zeros(keys, np.int64)
        for _ in range(60):
            some = np.unique((rng.pareto(0.7, 1500) * 40).astype(np.int64) % keys)
            table._table.prefetch(rng.permutation(keys)[:700], 8)
            before = table.pull(some)
            table.push(some, np.full((len(some), DIM), -1, np.float32))
            assert (table.pull(some) > before).all()
            given[some] += 1
        return given

    with ThreadPoolExecutor(threads) as pool:
        given = sum(pool.map(work, range(threads)))
    rows = table.pull(np.arange(keys), read_only=True)
    np.testing.assert_array_equal(rows, np.repeat(given[:, None], DIM, 1))
    assert table.counters["demoted"] > 10 * keys


def test_memory_stays_within_its_budget_in_one_large_batch() -> None:
    table = LocalTable.create("t", DIM, memory_bytes=1 << 20, optimizer="adagrad")
    keys = np.arange(20_000)
    grads = np.ones((20_000, DIM), np.float32)
    for _ in range(2):
        table.push(keys, grads)
        assert table.nbytes < 1.15 * (1 << 20)
        table.pull(keys)
        assert table.nbytes < 1.15 * (1 << 20)
    rows = table.pull(keys, read_only=True)
    first = LocalTable.create("t", DIM).pull(keys)
    np.testing.assert_allclose(rows, first - 0.01 - 0.01 / 2**0.5, atol=1e-6)


# Prints by how many bytes this process has grown.
_GROWN = """
import sys
import numpy as np
from ps import LocalTable

def used():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def push(table, begin):
    keys = np.arange(begin, begin + 2000)
    table.push(keys, np.ones((2000, 64), np.float32))
    table.pull(keys)

push(LocalTable.create("small", 64), 0)
before = used()
table = LocalTable.create("t", 64, memory_bytes=int(sys.argv[1]), optimizer="adagrad")
for begin in range(0, 200_000, 2000):
    push(table, begin)
print(used() - before)
"""


def test_memory_of_the_process_stays_within_the_budget() -> None:
    """Rows of half a KiB, of which slabs would hold half as many again."""
    budget = 20 << 20
    command = [sys.executable, "-c", _GROWN, str(budget)]
    # Else malloc keeps some MiB of the arrays that are pushed and pulled here.
    given = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.15 * budget + (3 << 20)


def test_memory_leaves_room_for_an_index_that_grows() -> None:
    """With narrow rows the index comes to need most of it."""
    table = LocalTable.create("t", 1, memory_bytes=1 << 20, optimizer="sgd")
    for begin in range(0, 80_000, 4000):
        table.push(np.arange(begin, begin + 4000), np.ones((4000, 1), np.float32))
        assert table.nbytes < 1.15 * (1 << 20)
    assert len(table) == 80_000
    assert table.counters["disk_rows"] > 20_000


@pytest.mark.parametrize("options", [{}, {"eviction": Eviction(ttl_steps=1000)}])
def test_no_more_rows_leave_memory_than_have_to(options: dict[str, Any]) -> None:
    """A row has with it key, generation, heat, and how it was used where a rule asks for that."""
    table = LocalTable.create("t", 1, memory_bytes=1 << 22, optimizer="sgd", **options)
    takes = 4 + 8 + 4 + 1 + (20 if options else 0)
    target = (1 << 22) // 64 // 10 * 9  # of the one sub-table in which the keys are
    others, keys = table.nbytes * 63 // 64, iter(crowded(4000))
    while table.nbytes - others <= target + 50 * takes:
        table.push([next(keys)], np.ones((1, 1), np.float32))
    assert table.counters["disk_rows"] == 0
    excess = table.nbytes - others - target
    table._table.demote()
    assert table.counters["disk_rows"] == -(-excess // takes)


def test_what_goes_and_comes_is_counted() -> None:
    table = LocalTable.create("t", DIM, memory_bytes=BUDGET, optimizer="sgd", learning_rate=0.1)
    fill(table)
    c = table.counters
    assert c["promoted"] == 0
    assert c["demoted"] == c["disk_rows"] > KEYS // 2
    assert c["disk_bytes"] >= c["disk_rows"] * 4 * DIM
    assert c["rows"] == KEYS
    keys = np.arange(500)
    table.pull(keys, read_only=True)
    assert table.counters == c | {"pulled": 500}
    table.pull(keys)
    came = table.counters["promoted"]
    assert 0 < came <= 500
    assert table.counters["demoted"] - table.counters["promoted"] == table.counters["disk_rows"]
    table.push(keys, np.zeros((500, DIM), np.float32))  # they are in memory now
    assert table.counters["promoted"] - came < 50


def test_rows_in_use_stay_in_memory() -> None:
    table = LocalTable.create("t", DIM, memory_bytes=BUDGET, optimizer="sgd", learning_rate=0.1)
    fill(table)
    hot = np.arange(300)
    for _ in range(10):
        table.pull(hot)
    for begin in range(1000, KEYS, 200):  # a scan of all the others
        table.pull(np.arange(begin, begin + 200))
        table.pull(hot)
    before = table.counters["promoted"]
    table.pull(hot)
    assert table.counters["promoted"] - before < 30


def test_evicted_rows_on_disk_are_gone() -> None:
    rules = Eviction(ttl_steps=10)
    table = LocalTable.create(
        "t", DIM, memory_bytes=BUDGET, optimizer="adagrad", eviction=rules, scale=1.0
    )
    first = LocalTable.create("t", DIM, scale=1.0).pull(np.arange(KEYS))
    fill(table)  # at step 0
    kept = np.arange(0, KEYS, 10)
    for begin in range(0, len(kept), 500):
        some = kept[begin : begin + 500]
        table.push(some, np.ones((len(some), DIM), np.float32), step=5)
    flush(table)
    on_disk = table.counters["disk_rows"]
    rows = table.pull(kept, read_only=True)
    assert table.shrink(step=11) == KEYS - len(kept)
    assert table.counters["evicted"] == KEYS - len(kept)
    assert table.counters["disk_rows"] < on_disk / 2
    assert sorted(table.keys().tolist()) == kept.tolist()
    np.testing.assert_array_equal(table.pull(kept), rows)
    gone = np.setdiff1d(np.arange(KEYS), kept)
    np.testing.assert_array_equal(table.pull(gone), first[gone])
    used = table.counters["disk_bytes"]
    for _ in range(8):  # the room they had is used again
        fill(table)
        assert len(table) == KEYS
        flush(table)
        assert table.shrink(step=11) == KEYS
    assert table.counters["disk_bytes"] <= 2 * used


def test_a_checkpoint_of_a_tiered_table(tmp_path: Path) -> None:
    options = OPTIONS["adagrad"] | {"eviction": Eviction(ttl_steps=1000)}
    table = LocalTable.create("t", DIM, memory_bytes=BUDGET, **options)
    fill(table)
    every = np.arange(KEYS)
    rows = table.pull(every, read_only=True)
    table.save(tmp_path / "ck")
    other = LocalTable.create("t", DIM, memory_bytes=BUDGET, **options)
    other.load(tmp_path / "ck")
    assert other.nbytes < LIMIT
    assert other.counters["disk_rows"] > KEYS // 2
    np.testing.assert_array_equal(other.pull(every, read_only=True), rows)
    for keys, grads in batches(3, 5):
        for each in (table, other):
            each.push(keys, grads)
    np.testing.assert_array_equal(other.pull(every), table.pull(every))


def test_a_snapshot_has_the_rows_of_its_cut_while_they_come_and_go() -> None:
    table = LocalTable.create("t", DIM, memory_bytes=BUDGET, **OPTIONS["adagrad"])
    fill(table)
    every = np.arange(KEYS)
    expected = table.pull(every, read_only=True)
    snapshot = table._table.snapshot(since=0, values=True, min_score=0.0, buckets=None)
    found: dict[int, NDArray[np.float32]] = {}
    changes = iter(batches(5, 400, 500))
    while (block := snapshot.next()) is not None:
        gone, keys, rows = _native.decode_block(block, DIM)
        assert not gone
        for key, row in zip(keys.tolist(), rows, strict=True):
            assert key not in found
            found[key] = row
        keys, grads = next(changes)
        table.push(keys, grads)
        table.push(keys + KEYS, grads)  # new ones are not in it
        table.pull(np.random.default_rng(len(found)).integers(0, KEYS, 500))
        flush(table)
    assert sorted(found) == every.tolist()
    np.testing.assert_array_equal(np.stack([found[k] for k in every.tolist()]), expected)
    assert (table.pull(every) != expected).any()


def test_a_prefetch_brings_rows_into_memory(client: ParameterClient) -> None:
    client.create_table("tiered", DIM, memory_bytes=BUDGET, **OPTIONS["sgd"])
    keys = np.random.default_rng(0).permutation(KEYS)
    for some in np.array_split(keys, 4):
        client.push("tiered", some, np.ones((len(some), DIM), np.float32))

    def total(name: str) -> int:
        return sum(getattr(t, name) for s in client.stats() for t in s.tables if t.name == "tiered")

    # A shard also makes room by itself.
    wait_until(lambda: total("bytes") <= 3 * BUDGET, "there is room", 20.0)
    assert total("rows") == KEYS
    assert total("disk_rows") > KEYS // 3
    some = np.concatenate([np.arange(400), [KEYS + 1]])
    rows = client.pull("tiered", some, read_only=True)
    promoted, pulled = total("promoted"), total("pulled")
    assert promoted == 0
    client.prefetch("tiered", some).result(20)
    assert total("promoted") > 100
    assert total("pulled") == pulled
    assert total("rows") == KEYS  # and none is made
    np.testing.assert_array_equal(client.pull("tiered", some), rows)


def test_other_threads_go_on_while_keys_on_disk_are_listed(tmp_path: Path) -> None:
    table = LocalTable.create("t", DIM, memory_bytes=BUDGET)
    for begin in range(0, 60_000, 5000):
        table.push(np.arange(begin, begin + 5000), np.ones((5000, DIM), np.float32))
    flush(table)
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.0001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # so the lock changes hands only where somebody lets go of it
    try:
        wait_until(lambda: ticks)
        gone = 0
        for _ in range(20):
            before = ticks
            assert len(table._table.keys(1 << 20)) == 60_000
            gone += ticks - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert gone > 20
    assert len(table._table.keys(10)) == 10


def test_rows_on_disk_are_read_without_threads_of_the_kernel(tmp_path: Path) -> None:
    """A read that waited with one, for a lock or the device, might never end."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")

    def workers() -> list[str]:
        names = [one.read_text() for one in Path("/proc/self/task").glob("*/comm")]
        return [name for name in names if name.startswith("iou-wrk")]

    before = workers()
    table = LocalTable.create("t", DIM, directory=str(tmp_path), memory_bytes=BUDGET)
    draw = np.random.default_rng(0)
    for _ in range(60):
        keys = np.unique(draw.integers(0, 40_000, 4000)).astype(np.uint64)
        table.pull(keys)
        table.push(keys, np.ones((len(keys), DIM), np.float32))
        assert workers() == before
    assert table.counters["promoted"] > 60 * 1000


class Used:
    """A table of 50,000 rows, of which 7,000 are in memory, and who brings which from disk."""

    def __init__(self) -> None:
        self.count, self.keys = 50_000, np.random.default_rng(1).permutation(50_000)
        self.table = LocalTable.create("t", 64, memory_bytes=4_000_000, optimizer="adagrad")
        for some in np.array_split(self.keys, 8):
            self.table.push(some, np.ones((len(some), 64), np.float32))

    def share(self, steps: Iterable[NDArray[np.int64]]) -> float:
        """Of the rows that these steps pull and push, those that were on disk."""
        before, used = self.table.counters["promoted"], 0
        for keys in steps:
            self.table.pull(keys)
            self.table.push(keys, np.zeros((len(keys), 64), np.float32))
            used += len(keys)
        return (self.table.counters["promoted"] - before) / used

    def zipf(self, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        up_to = np.cumsum(self.shares)
        for _ in range(steps):
            ranks = np.minimum(np.searchsorted(up_to, rng.random(1000)), self.count - 1)
            yield np.unique(self.keys[ranks])

    @property
    def shares(self) -> NDArray[np.float64]:
        shares = 1 / np.arange(1, self.count + 1) ** 1.05
        return shares / shares.sum()


def test_rows_that_are_used_most_stay_in_memory() -> None:
    used = Used()
    used.share(used.zipf(500, seed=2))
    found = used.share(used.zipf(300, seed=3))
    comes = -np.expm1(1000 * np.log1p(-used.shares))  # whether a step needs it
    in_memory = used.count - used.table.counters["disk_rows"]
    best = comes[in_memory:].sum() / comes.sum()  # if those that come most often were known
    assert best < found < 1.17 * best


def test_what_was_used_before_gives_way_to_what_is_used_now() -> None:
    used = Used()
    used.share(used.zipf(400, seed=2))
    rng = np.random.default_rng(3)

    def moving(steps: int) -> Iterator[NDArray[np.int64]]:
        """Of 5,000 keys, 250 of which are others in the next step."""
        for step in range(steps):
            yield np.unique((250 * step + rng.integers(0, 5000, 520)) % used.count)

    used.share(moving(200))
    assert used.share(moving(100)) < 0.55  # counts that fade slowly: 0.79; half a step's are new


def test_new_rows_stay_until_they_are_used() -> None:
    table = LocalTable.create("t", 64, memory_bytes=4_000_000, optimizer="adagrad")
    for begin in range(0, 50_000, 1000):
        keys = np.arange(begin, begin + 1000)
        table.push(keys, np.ones((1000, 64), np.float32))
        table.pull(keys)
    assert table.counters["disk_rows"] > 40_000
    assert table.counters["promoted"] == 0


def test_rows_that_a_step_to_come_needs_stay_until_then() -> None:
    used = Used()
    coming, others = np.split(used.keys[:6000], [2000])
    used.share([coming])
    used.table._table.prefetch(coming, 8)
    assert used.share(np.array_split(others, 8)) > 0.5  # so that some leave
    assert used.share([coming]) < 0.02
