"""The network as a job on an embedded cluster: so many workers, so many shards."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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

_CODE = Path(__file__).parent / "job" / "model.py"


def write_job(folder: Path, data: Data, workers: int, shards: int, staleness: int) -> JobSpec:
    """Write a job's files into a folder; the data only once."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_CODE, folder)
    sparse, dense = [f"s{i}" for i in range(SLOTS)], [f"d{i}" for i in range(DENSE)]
    if not (folder / "train.parquet").exists():
        columns = {name: data.rows[:, i] for i, name in enumerate(sparse)}
        columns |= {name: data.dense[:, i] for i, name in enumerate(dense)}
        pq.write_table(pa.table({**columns, "label": data.labels}), folder / "train.parquet")
        (folder / ".heterpsignore").write_text("*\n!model.py\n")
    rows = {"learning_rate": LEARNING_RATE, "initial_accumulator": ACCUMULATOR, "eps": EPSILON}
    job = {
        "name": f"ctr {workers}+{shards}",
        "model": {
            "entry": "model.py:Ctr",
            "args": {
                "slots": SLOTS,
                "dense": DENSE,
                "dim": DIM,
                "widths": [*WIDTHS[1:]],
                "rows": {**rows, "scale": SCALE},
            },
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
            "resources": "resources.json",
            "elastic": {"min": workers, "max": workers},
            "replan": "off",
        },
        "output": "out",
    }
    kind = {"name": "cpu", "price_per_hour": 0.04, "limit": 8, "memory_bytes": 8e9, "device": "cpu"}
    (folder / "resources.json").write_text(json.dumps({"types": [kind]}))
    name = f"{workers}_{shards}_{staleness}.json"
    (folder / name).write_text(json.dumps(job))
    return load_job(folder / name)


def train(client: Client, job: JobSpec, steps: int) -> dict[str, float]:
    """Samples a second of a job of so many steps.

    Raises:
        RuntimeError: it failed, or had other workers than it was to have.
    """
    job.train.max_steps = steps
    job_id = client.submit(job)
    status = client.wait(job_id)
    if status.state != "succeeded":
        raise RuntimeError(f"{job_id} failed: {status.reason}")
    decision = client.decision_message(job_id)
    workers = sum(stage.units for stage in decision.stages)
    if workers != job.schedule.elastic.min:
        raise RuntimeError(f"{job_id}: planned on {workers} workers")
    found = decision.measured
    return {
        "samples_per_s": found.steady_throughput or found.throughput,
        "steps": float(found.steady_steps),
        "predicted": decision.throughput,
    }
