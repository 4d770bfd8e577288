"""What reading a job's data takes: rows a second and processor time, by workers of one host.

Each worker is a process that reads its share of every global batch, as those of a first stage do;
together they parse the files once. Rows have 13 sparse and 9 dense columns, as of the flights job.

    python -m bench.data [--rows 300000] [--workers 1 2 4] [--json FILE]
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from bench.pages import RESULTS, machine, versions, write
from chassis import scratch
from protos.job_pb2 import DataSpec
from workers.data import Dataset, GlobalBatches

SPARSE, DENSE, BATCH, EPOCHS = 13, 9, 2048, 2


@dataclass(frozen=True)
class Case:
    """What is read, and how."""

    file: str
    kept: bool  # in memory; else streamed
    workers: int


def make(folder: Path, rows: int) -> None:
    """The same rows in either format."""
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, rows).astype(np.int8)}
    for number in range(SPARSE):
        values = rng.integers(0, 10 ** (number % 4 + 1), rows)
        columns[f"s{number}"] = [f"v{v}" for v in values] if number < 7 else values
    for number in range(DENSE):
        columns[f"d{number}"] = rng.normal(size=rows).astype(np.float32)
    table = pa.table(columns)
    pa.parquet.write_table(table, folder / "rows.parquet", row_group_size=50_000)
    pa.csv.write_csv(table, folder / "rows.csv")


def work(folder: str, case: Case, rank: int) -> None:
    """One worker: seconds of the clock and of the processor, once it is told to begin."""
    spec = DataSpec(path=".", train=case.file, label="label")
    spec.sparse.extend(f"s{number}" for number in range(SPARSE))
    spec.dense.extend(f"d{number}" for number in range(DENSE))
    print("ready", flush=True)
    sys.stdin.readline()
    began, used = time.perf_counter(), time.process_time()
    dataset = Dataset(spec, "train", folder, cache_bytes=(512 if case.kept else 16) << 20)
    batches = GlobalBatches(dataset, BATCH, epochs=EPOCHS)
    for step in range(batches.steps):
        n = batches.samples(step)
        batches.read(step, n * rank // case.workers, n * (rank + 1) // case.workers)
    batches.close()
    seconds = [time.perf_counter() - began, time.process_time() - used]
    print(json.dumps(seconds), flush=True)


def measure(folder: Path, case: Case) -> tuple[float, float]:
    """Seconds until the last worker was done, and of the processor for all of them."""
    with tempfile.TemporaryDirectory() as shared:
        environment = os.environ | {scratch.VARIABLE: shared, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.data",
                    "--work",
                    str(folder),
                    json.dumps(asdict(case)),
                    str(rank),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(case.workers)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        taken = [json.loads(process.communicate()[0]) for process in processes]
    return max(wall for wall, _ in taken), sum(used for _, used in taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "data.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        folder, case, rank = options.work
        work(folder, Case(**json.loads(case)), int(rank))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), options.rows)
        for file in ("rows.parquet", "rows.csv"):
            for kept in (True, False):
                for workers in options.workers:
                    case = Case(file, kept, workers)
                    rounds = [measure(Path(name), case) for _ in range(options.rounds)]
                    wall, used = (
                        sorted(part)[len(part) // 2] for part in zip(*rounds, strict=True)
                    )
                    rows_per_s = EPOCHS * options.rows / wall
                    cpu_s = used / (EPOCHS * options.rows / 1e6)
                    results.append(
                        asdict(case) | {"rows_per_s": rows_per_s, "cpu_s_per_million_rows": cpu_s}
                    )
                    print(
                        f"{file:13} {'kept' if kept else 'streamed':9} {workers} workers: "
                        f"{rows_per_s:10,.0f} rows/s, {cpu_s:6.2f} CPU s a million rows",
                        flush=True,
                    )
    result = {
        "benchmark": "data",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("numpy", "pyarrow"),
        "rows": options.rows,
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "results": results,
    }
    write(options.json, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
