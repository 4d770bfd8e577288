"""Processes of a host parse a split once between them, whoever dies, and hold what they may."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chassis import scratch
from protos.job_pb2 import DataSpec
from tests.waiting import wait_until
from workers.data import Batch, DataError, Dataset, GlobalBatches, sharing
from workers.data.batches import in_order
from workers.data.columns.arrays import Encoder

ROWS = 2000
STREAMED: dict[str, Any] = {"cache_bytes": 0, "block_rows": 64, "window_rows": 100}
LEAST = 3  # windows that are kept at once where there is room for none


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A split, and the folder that this process and those that it starts share."""
    row = np.arange(ROWS)
    words = [f"w{r % 7}" for r in row]
    table = pa.table({"row": row, "label": row % 2, "word": words, "half": row // 2})
    pa.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=150)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = scratch.folder_of("job", 1)
    monkeypatch.setenv(scratch.VARIABLE, str(folder))
    return folder


def dataset(folder: Path, dense: str = "row", **options: Any) -> Dataset:
    spec = DataSpec(path=".", train="rows.parquet", label="label", dense=[dense], sparse=["word"])
    return Dataset(spec, "train", folder, **options)


def rows_of(batch: Batch) -> list[int]:
    return [int(row) for row in batch["dense"][:, 0]]


# A worker that reads its share of each step, told what by its arguments; says how many rows it
# has parsed.
WORKER = """
import json, sys, time
from protos.job_pb2 import DataSpec
from workers.data import Dataset, GlobalBatches
from workers.data.columns.arrays import Encoder

given = json.loads(sys.argv[1])
parsed, encode = 0, Encoder.encode

def counted(self, block, path, first=0):
    global parsed
    parsed += block.num_rows
    time.sleep(given["pause"])
    return encode(self, block, path, first)

Encoder.encode = counted
spec = DataSpec(
    path=".", train="rows.parquet", label="label", dense=[given["dense"]], sparse=["word"]
)
dataset = Dataset(spec, "train", given["folder"], **given["options"])
batches = GlobalBatches(dataset, given["batch"], seed=7, epochs=given["epochs"])
if given["hurry"]:
    batches.read(0, 0, 1)
print('"begins"', flush=True)
sys.stdin.readline()
rows = []
for step in range(batches.steps):
    n, width = batches.samples(step), given["width"]
    first, last = n * given["rank"] // width, n * (given["rank"] + 1) // width
    rows.append(batches.read(step, first, last)["dense"][:, 0].astype(int).tolist())
print(json.dumps(rows), flush=True)
sys.stdin.readline()
print(parsed, flush=True)
sys.stdin.readline()
"""


@dataclass
class Worker:
    """One such process."""

    process: subprocess.Popen[str]

    def go(self) -> None:
        """Let it read, or say what it has parsed."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def parsed(self) -> int:
        """Rows that it has parsed, once it has read."""
        self.go()
        rows: int = self.says()
        return rows


@pytest.fixture
def start(shared: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts workers of so many; they begin when they are told."""
    workers: list[Worker] = []

    def begin(rank: int, width: int, **given: Any) -> Worker:
        keys = {"folder": str(tmp_path), "dense": "row", "pause": 0, "epochs": 2, "batch": 300}
        keys |= {"rank": rank, "width": width, "hurry": False, "options": {}}
        environment = os.environ | given.pop("environment", {})
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(keys | given)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        workers.append(Worker(process))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.process.kill()
        worker.process.communicate()


def ready(*workers: Worker) -> None:
    for worker in workers:
        assert worker.says() == "begins"


def expected(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    """What one process that shares with nobody reads."""
    with monkeypatch.context() as patch:
        patch.delenv(scratch.VARIABLE)
        batches = GlobalBatches(dataset(folder, **options), 300, seed=7, epochs=2)
        return [rows_of(batches.read(step)) for step in range(batches.steps)]


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_processes_parse_once_between_them(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any, options: Any
) -> None:
    # All have begun before any goes on: who comes late reads by itself.
    workers = [start(rank, 3, options=options, hurry=True) for rank in range(3)]
    ready(*workers)
    for worker in workers:
        worker.go()
    shares = zip(*(worker.says() for worker in workers), strict=True)
    steps = [list(chain.from_iterable(parts)) for parts in shares]
    assert steps == expected(tmp_path, monkeypatch, **options)
    parsed = sum(worker.parsed() for worker in workers)
    if options:  # each epoch anew, and a little of the next, which nobody will ask for
        assert 2 * ROWS <= parsed <= 2 * ROWS + 8 * 100
        assert 1 <= len(list(shared.glob("*/*/*.rows"))) <= LEAST
    else:
        assert parsed == ROWS
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
    scratch.sweep()
    assert not shared.exists()


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_one_that_parses_and_is_killed_is_replaced(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any, options: Any
) -> None:
    # Slow enough to be in the middle when it is killed, however busy the machine.
    pause = 0.3 if options else 60
    slow = start(0, 1, options=options | {"block_rows": 100}, pause=pause, hurry=True)
    other = start(0, 1, options=options)
    ready(other)
    if options:
        ready(slow)
        slow.go()
    else:
        wait_until(lambda: any(shared.glob("*/rows.unfinished")))
    other.go()
    readers = 2 if options else 0
    wait_until(lambda: len(list(shared.glob("*/*/*.reader"))) == readers)
    slow.process.kill()
    assert other.says() == expected(tmp_path, monkeypatch, **options)
    assert other.parsed() > 0


def test_jobs_do_not_mix(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    elsewhere = {scratch.VARIABLE: str(scratch.folder_of("another", 1))}
    same = start(0, 1, options=STREAMED, environment=elsewhere)
    columns = start(0, 1, options=STREAMED, dense="half")
    here = start(0, 1, options=STREAMED)
    ready(same, columns, here)
    for worker in (same, columns, here):
        worker.go()
    rows = expected(tmp_path, monkeypatch, **STREAMED)
    assert here.says() == same.says() == rows
    assert columns.says() == [[row // 2 for row in step] for step in rows]
    assert len(list(shared.iterdir())) == 3  # a lock, and two splits


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    width=st.integers(1, 5),
    batch_size=st.integers(20, 700),
    window_rows=st.integers(150, 900),
    seed=st.integers(0, 2**40),
)
def test_readers_of_any_number_read_the_same_windows(
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    batch_size: int,
    window_rows: int,
    seed: int,
) -> None:
    options = STREAMED | {"window_rows": window_rows}
    monkeypatch.setattr(sharing, "_POLL_S", 0.001)
    monkeypatch.setattr(sharing, "_PAUSE_S", 0.001)

    def batches() -> GlobalBatches:
        return GlobalBatches(dataset(tmp_path, **options), batch_size, seed=seed, epochs=2)

    most = 0

    def read(rank: int) -> dict[int, list[int]]:
        nonlocal most
        own, found = batches(), {}
        for step in range(rank, own.steps, width):
            found[step] = rows_of(own.read(step))
            most = max(most, len(list(shared.glob(f"*/windows-{seed}-*-{window_rows}/*.rows"))))
        own.close()
        return found

    with ThreadPoolExecutor(width) as pool:
        found: dict[int, list[int]] = {}
        for part in pool.map(read, range(width)):
            found |= part
    with monkeypatch.context() as patch:
        patch.delenv(scratch.VARIABLE)
        alone = batches()
        steps = [rows_of(alone.read(step)) for step in range(alone.steps)]
    assert [found[step] for step in range(len(steps))] == steps
    assert most <= LEAST


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_held_out_splits_are_shared_as_well(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    parsed = 0
    encode, lock = Encoder.encode, threading.Lock()

    def counted(self: Encoder, block: pa.RecordBatch, *given: Any) -> Batch:
        nonlocal parsed
        with lock:
            parsed += block.num_rows
        return encode(self, block, *given)

    monkeypatch.setattr(Encoder, "encode", counted)

    begun = threading.Barrier(3)  # within one window: who comes late reads by itself

    def read(rank: int) -> dict[int, list[int]]:
        found = {}
        for number, batch in in_order(dataset(tmp_path, **options), 32, rank, 3):
            found[number] = rows_of(batch)
            if number == rank:
                begun.wait()
        return found

    with ThreadPoolExecutor(3) as pool:
        found = {n: rows for part in pool.map(read, range(3)) for n, rows in part.items()}
    assert [row for number in sorted(found) for row in found[number]] == list(range(ROWS))
    assert parsed == ROWS


def test_who_comes_too_late_or_waits_for_one_that_stays_behind_reads_by_itself(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_PATIENCE_S", 0.2)
    steps = expected(tmp_path, monkeypatch, **STREAMED)
    first, late = (
        GlobalBatches(dataset(tmp_path, **STREAMED), 300, seed=7, epochs=2) for _ in range(2)
    )
    assert [rows_of(first.read(step)) for step in range(5)] == steps[:5]
    assert [rows_of(late.read(step)) for step in range(late.steps)] == steps
    assert [rows_of(first.read(step)) for step in range(5, first.steps)] == steps[5:]
    assert len(list(shared.glob("*/*/*.rows"))) <= LEAST
    first.close()
    late.close()


def test_a_disk_without_room_is_no_end(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    wanted = [expected(tmp_path, monkeypatch, **options) for options in ({}, STREAMED)]
    monkeypatch.setattr(os, "posix_fallocate", full)
    for options, steps in zip(({}, STREAMED), wanted, strict=True):
        batches = GlobalBatches(dataset(tmp_path, **options), 300, seed=7, epochs=2)
        assert [rows_of(batches.read(step)) for step in range(batches.steps)] == steps
        batches.close()


def test_rows_that_another_has_parsed_of_a_changed_file_are_not_used(
    tmp_path: Path, shared: Path
) -> None:
    early, kept = dataset(tmp_path), dataset(tmp_path)
    before = kept.encoded()
    words = ["w"] * ROWS
    row = np.arange(ROWS)[::-1]
    table = pa.table({"row": row, "label": row % 2, "word": words, "half": row // 2})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    assert rows_of(dataset(tmp_path).encoded()) == row.tolist()
    assert rows_of(early.encoded()) == rows_of(before) == list(range(ROWS))
    late = dataset(tmp_path, dense="half")
    pa.parquet.write_table(table.slice(0, 10), tmp_path / "rows.parquet")
    assert len(dataset(tmp_path, dense="half").encoded()) == 10
    with pytest.raises(DataError, match="as it was when reading began"):
        late.encoded()
