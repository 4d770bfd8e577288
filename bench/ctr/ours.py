"""The network as a job on an embedded cluster: so many workers, so many shards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.ctr.processors import SHARD, WORKER, Processors
from bench.ctr.roster import Ours, unit
from bench.ctr.shape import (
    ACCUMULATOR,
    BATCH,
    DENSE,
    DENSE_RATE,
    DIM,
    EPSILON,
    LEARNING_RATE,
    SCALE,
    SLOTS,
    WIDTHS,
    Data,
)
from heterps import Client
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec

_CODE = Path(__file__).parent / "job"
_MARKS = "marks.txt"
_WARM = 16  # steps until caches are warm and the pipeline is steady


def write_job(folder: Path, data: Data, ours: Ours) -> JobSpec:
    """Write a job's files into a folder; the data only once."""
    workers, shards, staleness = ours.workers, ours.shards, ours.staleness
    own = unit(ours.threads)
    folder.mkdir(parents=True, exist_ok=True)
    for code in _CODE.glob("*.py"):
        shutil.copy(code, folder)
    sparse, dense = [f"s{i}" for i in range(SLOTS)], [f"d{i}" for i in range(DENSE)]
    if not (folder / "train.parquet").exists():
        columns = {name: data.rows[:, i] for i, name in enumerate(sparse)}
        columns |= {name: data.dense[:, i] for i, name in enumerate(dense)}
        pq.write_table(pa.table({**columns, "label": data.labels}), folder / "train.parquet")
        (folder / ".heterpsignore").write_text("*\n!model.py\n!marks.py\n")
    rows = {"learning_rate": LEARNING_RATE, "initial_accumulator": ACCUMULATOR, "eps": EPSILON}
    job = {
        "name": f"ctr {workers}+{shards} on {own}",
        "model": {
            "entry": "model.py:Ctr",
            "args": {
                "slots": SLOTS,
                "dense": DENSE,
                "dim": DIM,
                "widths": [*WIDTHS[1:]],
                "rows": {**rows, "scale": SCALE},
            },
            "callbacks": ["marks.py:Marks"],
            "callback_args": {"Marks": {"path": str((folder / _MARKS).absolute())}},
        },
        "data": {"train": "train.parquet", "label": "label", "sparse": sparse, "dense": dense},
        "train": {
            "epochs": 1000,
            "batch_size": BATCH,
            "staleness": staleness,
            "loss": "bce_with_logits",
            "optimizer": {"name": "adam", "learning_rate": DENSE_RATE},
        },
        "servers": {"shards": shards},
        "schedule": {
            "method": "exact",
            "resources": f"resources_{own}.json",
            "pin": dict.fromkeys(("embedding", "tower"), own),
            "elastic": {"min": workers, "max": workers},
            "replan": "off",
        },
        "output": "out",
    }
    # Shards have cores of their own to be planned on, so that a worker may have all that there are.
    kinds = [_kind(threads) for threads in sorted({1, ours.threads})]
    resources = f"resources_{own}.json"
    (folder / resources).write_text(json.dumps({"types": kinds}))
    name = f"{workers}_{shards}_{staleness}_{own}.json"
    (folder / name).write_text(json.dumps(job))
    return load_job(folder / name)


def _kind(threads: int) -> dict[str, Any]:
    """A unit of so many cores."""
    kind = {"name": unit(threads), "price_per_hour": 0.04 * threads, "limit": 8 // threads}
    return kind | {"memory_bytes": 8e9, "device": "cpu", "threads": threads}


def train(client: Client, job: JobSpec, folder: Path, steps: int) -> dict[str, float]:
    """Samples a second of a job of so many steps, and its processor seconds a step.

    Raises:
        RuntimeError: it failed, had other workers or shards than it was to have, or was too short.
    """
    job.train.max_steps = steps
    (folder / _MARKS).unlink(missing_ok=True)
    with Processors() as used:
        job_id = client.submit(job)
        status = client.wait(job_id)
    if status.state != "succeeded":
        raise RuntimeError(f"{job_id} failed: {status.reason}")
    decision = client.decision_message(job_id)
    found = decision.measured
    if not found.steady_steps:
        raise RuntimeError(f"{job_id}: {steps} steps are too few for a steady rate")
    marks = [float(line) for line in (folder / _MARKS).read_text().split()]
    if len(marks) != steps:
        raise RuntimeError(f"{job_id}: {len(marks)} steps were told of, expected {steps}")
    span = marks[_WARM], marks[-2]
    workers, shards = (list(used.seconds(one, span).values()) for one in (WORKER, SHARD))
    wanted = job.schedule.elastic.min, job.servers.shards
    if (len(workers), len(shards)) != wanted:
        raise RuntimeError(
            f"{job_id}: {len(workers)} workers and {len(shards)} shards were there throughout, "
            f"expected {wanted[0]} and {wanted[1]}"
        )
    watched = steps - _WARM - 2
    return {
        "samples_per_s": found.steady_throughput,
        "steps": float(found.steady_steps),
        "predicted": decision.throughput,
        "cpu_s": sum(workers) / watched,
        "server_cpu_s": sum(shards) / watched,
    }
