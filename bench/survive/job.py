"""A job of two stages with rows, whose layers sleep: exact costs, and real gradients.

Each sample has a row of its own besides, which counts how often it was trained.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.naming import without_prefix
from ps import LocalTable
from scheduler import plan
from workers.data import Dataset

_ROWS = 40  # keys of each column
_COLUMNS = 2
CODE = Path(__file__).parent / "code"
_LAYERS = {"counter": "front", "embedding": "front", "tower": "front", "head": "back"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the job.

    Attributes:
        front, back: workers of its two stages.
        seconds: a sample takes in a stage, over its workers.
        batch: samples a step, in `micro_batches` micro-batches.
        width: of the dense layers.
    """

    front: int = 2
    back: int = 2
    seconds: float = 0.01
    batch: int = 32
    micro_batches: int = 4
    steps: int = 100
    width: int = 8
    staleness: int = 0

    @property
    def samples(self) -> int:
        """Of an epoch, which ends in the midst of a batch."""
        return 8 * self.batch + self.batch // 2 + 1

    @property
    def steps_per_epoch(self) -> int:
        """Of which the last is of fewer samples."""
        return 9


def write_job(folder: Path, shape: Shape, **overrides: object) -> JobSpec:
    """Write the job's files; the job, which keeps two workers in each stage busy."""
    folder.mkdir(parents=True)
    (folder / "trace").mkdir()
    (folder / "front").mkdir()
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, _ROWS, (shape.samples, _COLUMNS))
    lines = [f"{rng.integers(2)},{a},{b},{n}" for n, (a, b) in enumerate(keys)]
    (folder / "train.csv").write_text("\n".join(["y,a,b,sample", *lines]) + "\n")
    (folder / ".heterpsignore").write_text("*\n!model.py\n!sleeping.py\n")
    (folder / "workload.json").write_text(json.dumps(_workload(shape)))
    (folder / "resources.json").write_text(json.dumps(_resources(shape)))
    job = {
        "name": "survivor",
        "model": {
            "entry": "model.py:Model",
            "args": {
                "front_s": shape.seconds * shape.front,
                "back_s": shape.seconds * shape.back,
                "width": shape.width,
                "front_trace": str(folder / "front"),
                "trace": str(folder / "trace"),
            },
        },
        "data": {"train": "train.csv", "label": "y", "sparse": ["a", "b", "sample"]},
        "train": {
            "epochs": 1_000_000,
            "max_steps": shape.steps,
            "batch_size": shape.batch,
            "micro_batches": shape.micro_batches,
            "staleness": shape.staleness,
            "loss": "bce_with_logits",
            "optimizer": {"name": "adam", "learning_rate": 0.01},
        },
        "servers": {"shards": 2, "durability": "log"},
        "schedule": {
            "method": "exact",
            "workload": "workload.json",
            "resources": "resources.json",
            "pin": _LAYERS,
            "min_throughput": 0.999 * _highest(shape),
        },
        "output": "out",
    }
    (folder / "job.json").write_text(json.dumps(job))
    return load_job(folder / "job.json", overrides)


@dataclass(frozen=True, slots=True)
class Result:
    """What a job came to.

    Attributes:
        digest: of weights and rows, to the bit.
        rows: float32 [keys, 4], learned.
        trained: float32 [samples], how often each was, in the order of the data.
    """

    digest: str
    rows: NDArray[np.float32]
    trained: NDArray[np.float32]


def result_of(spec: JobSpec, model: Path) -> Result:
    """Of a saved model."""
    saved = LocalTable.load_checkpoint(model / "tables")
    tables: Mapping[str, LocalTable] = {without_prefix(name): t for name, t in saved.items()}
    keys = np.asarray(Dataset.of(spec, "train").encoded()["sparse"])
    rows = tables["rows"].pull(np.unique(keys[:, :_COLUMNS]))
    trained = tables["seen"].pull(keys[:, _COLUMNS])[:, 0]
    weights = (model / "dense.safetensors").read_bytes()
    whole = hashlib.sha256(weights + rows.tobytes() + trained.tobytes())
    return Result(whole.hexdigest(), rows, trained)


def steps_begun(folder: Path) -> list[float]:
    """When each micro-batch's backward began in the last stage, as its layers say."""
    files = (folder / "trace").iterdir()
    return sorted(float(line.split()[0]) for f in files for line in f.read_text().splitlines())


def firsts_begun(folder: Path) -> list[float]:
    """When each process of any stage began its first micro-batch's backward, in order."""
    files = [file for of in ("front", "trace") for file in folder.glob(f"{of}/*")]
    return sorted(float(text.split(maxsplit=1)[0]) for f in files if (text := f.read_text()))


def trained_last(folder: Path) -> float:
    """When the last stage began something, Unix time; 0: it never did."""
    return max((file.stat().st_mtime for file in (folder / "trace").iterdir()), default=0.0)


def _highest(shape: Shape) -> float:
    """Samples a second that all units together reach."""
    return plan(_workload(shape), _resources(shape), 1e9, "exact", pin=_LAYERS).throughput


def _workload(shape: Shape) -> dict[str, Any]:
    cost = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_compute": 1.0, "parallel_sync": 1.0}
    size = max(1, shape.batch // shape.micro_batches)
    units = {"front": shape.front, "back": shape.back}
    share = {"counter": 0.01, "embedding": 0.01, "tower": 0.98, "head": 1.0}
    layers = [
        {
            "name": name,
            "kind": "dense",
            "cost": {
                kind: {
                    "compute_s": shape.seconds * units[kind] * size * share[name],
                    "memory_bytes": 1e3,
                    **cost,
                }
            },
        }
        for name, kind in _LAYERS.items()
    ]
    steps = {"batch": shape.batch, "micro_batches": shape.micro_batches}
    head = {"name": "survivor", "reference_batch": size, "samples": 1e6}
    return (
        head
        | steps
        | {"staleness": shape.staleness}
        | {"ps_type": "cpu", "ps_core_s": 1e-9, "layers": layers}
    )


def _resources(shape: Shape) -> dict[str, Any]:
    limits = {"cpu": 1, "front": shape.front, "back": shape.back}
    common = {"price_per_hour": 1.0, "memory_bytes": 1e12, "device": "cpu"}
    return {"types": [{"name": name, "limit": n, **common} for name, n in limits.items()]}
