"""Jobs of k workers whose layers sleep, with rows or not: k grows, a worker's share does not."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from scheduler import Resources, Workload
from scheduler.planning.executed import executed
from scheduler.problem.cost import CostModel

FRONT, BACK, SERVER = "front", "back", "server"
_CODE = Path(__file__).parent / "code" / "model.py"
_EPOCH = 8  # steps
_KEYS = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """A job.

    Attributes:
        front, back: workers of its stages; none in a second one where there is none.
        keys: that a sample has; 0: no rows at all.
        rounds: micro-batches of a worker of the first stage in a step, `size` samples each.
        seconds: that a worker of the first stage sleeps for a micro-batch; of the second one as
            many as keep all of its workers as busy.
    """

    kind: str
    front: int
    back: int = 0
    keys: int = 0
    staleness: int = 0
    shards: int = 1
    rounds: int = 1
    size: int = 256
    seconds: float = 0.06

    @property
    def name(self) -> str:
        units = f"{self.front}+{self.back}" if self.back else f"{self.front}"
        return f"{self.kind} {units} S{self.staleness}"

    @property
    def workers(self) -> int:
        return self.front + self.back

    @property
    def micro_batches(self) -> int:
        return self.rounds * self.front

    @property
    def batch(self) -> int:
        return self.micro_batches * self.size

    @property
    def back_s(self) -> float:
        """Seconds that a worker of the second stage sleeps for a micro-batch."""
        return self.seconds * self.back / self.front

    @property
    def layers(self) -> dict[str, float]:
        """Seconds a micro-batch, by the types that have the layers' names."""
        return {FRONT: self.seconds} | ({BACK: self.back_s} if self.back else {})


def write_job(folder: Path, case: Case, steps: int) -> JobSpec:
    """Write a job's files, its traces' folders too."""
    folder.mkdir(parents=True)
    for name in (FRONT, BACK):
        (folder / name).mkdir()
    shutil.copy(_CODE, folder)
    rng = np.random.default_rng(0)
    rows = _EPOCH * case.batch
    columns: dict[str, Any] = {"y": rng.integers(0, 2, rows).astype(np.float32)}
    if case.keys:
        flat = pa.array(rng.integers(0, _KEYS, rows * case.keys))
        columns["x"] = pa.FixedSizeListArray.from_arrays(flat, case.keys).cast(pa.list_(pa.int64()))
        x: dict[str, Any] = {"type": "keys", "length": case.keys, "slot": "x"}
    else:
        columns["x"] = rng.normal(size=rows).astype(np.float32)
        x = {"type": "float"}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    (folder / "workload.json").write_text(json.dumps(_workload(case)))
    (folder / "resources.json").write_text(json.dumps(_resources(case)))
    pins = {"input": FRONT, "front": FRONT} | ({"back": BACK} if case.back else {})
    job = {
        "name": "scale",
        "model": {
            "entry": "model.py:Net",
            "args": {
                "keys": case.keys,
                "front_s": case.seconds / case.size,
                "back_s": case.back_s / case.size,
                "front": str(folder / FRONT),
                "back": str(folder / BACK),
            },
        },
        "data": {"train": "train.parquet", "label": "y", "columns": {"x": x}},
        "train": {
            "epochs": 1_000_000,
            "max_steps": steps,
            "batch_size": case.batch,
            "micro_batches": case.micro_batches,
            "staleness": case.staleness,
            "loss": "mse",
            "optimizer": {"name": "sgd", "learning_rate": 1e-6},
        },
        "servers": {"shards": case.shards, "durability": "none"},
        "schedule": {
            "method": "exact",
            "workload": "workload.json",
            "resources": "resources.json",
            "pin": pins,
            "min_throughput": 0.999 * _pace(case),
            "replan": "off",
        },
        "output": "out",
    }
    (folder / "job.json").write_text(json.dumps(job))
    return load_job(folder / "job.json", {})


def begun(folder: Path, case: Case) -> list[tuple[float, int]]:
    """When the last stage's micro-batches began, on the monotonic clock, and their samples."""
    files = (folder / (BACK if case.back else FRONT)).iterdir()
    lines = [line.split() for file in files for line in file.read_text().splitlines()]
    return sorted((float(at), int(samples)) for at, samples in lines)


def worker_pids(folder: Path) -> list[int]:
    """Of those that have trained."""
    return [int(file.name) for name in (FRONT, BACK) for file in (folder / name).iterdir()]


def _pace(case: Case) -> float:
    """Samples/s of the plan that has just the workers of a case."""
    workload, offer = Workload.parse(_workload(case)), Resources.parse(_resources(case))
    model = CostModel(workload, offer)
    codes = [model.types.index(name) for name in (FRONT, FRONT, BACK)[: len(workload.layers)]]
    units = [case.front, case.back][: 2 if case.back else 1]
    return executed(model, model.evaluate(codes, units)).throughput


def _workload(case: Case) -> dict[str, Any]:
    cost = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_compute": 1.0, "parallel_sync": 1.0}
    cost |= {"memory_bytes": 1e3}
    slow = [
        {"name": name, "kind": "dense", "cost": {name: {"compute_s": seconds, **cost}}}
        for name, seconds in case.layers.items()
    ]
    first = {"name": "input", "kind": "dense", "cost": {FRONT: {"compute_s": 0.0, **cost}}}
    return {
        "name": "scale",
        "reference_batch": case.size,
        "samples": 1e9,
        "batch": case.batch,
        "micro_batches": case.micro_batches,
        "staleness": case.staleness,
        "ps_type": SERVER,
        "ps_core_s": 1e-9,
        "layers": [first, *slow],
    }


def _resources(case: Case) -> dict[str, Any]:
    limits = {FRONT: case.front, SERVER: 1} | ({BACK: case.back} if case.back else {})
    common = {"price_per_hour": 1.0, "memory_bytes": 1e12, "device": "cpu"}
    return {"types": [{"name": name, "limit": n, **common} for name, n in limits.items()]}
