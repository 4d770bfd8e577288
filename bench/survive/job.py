"""A job of two stages with rows, whose layers sleep: exact costs, and real gradients."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from ps import LocalTable
from scheduler import plan
from workers.data import Dataset

_ROWS = 40  # keys of each column
_MODEL = """
import os
import time

import torch
from torch import nn

from heterps import SparseEmbedding


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        time.sleep(layer.seconds * len(x) / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.note(len(gradient))
        time.sleep(ctx.layer.seconds * len(gradient) * 2 / 3)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, layer, seconds, trace=""):
        super().__init__()
        self.layer, self.seconds, self.trace = layer, seconds, trace

    def note(self, samples):
        if self.trace:
            with open(os.path.join(self.trace, str(os.getpid())), "a") as file:
                file.write(f"{time.time()!r} {samples}\\n")

    def forward(self, x):
        x = self.layer(x)
        return Sleep.apply(x, self) if self.training and x.requires_grad else x


class Model(nn.Module):
    def __init__(self, front_s, back_s, width, trace):
        super().__init__()
        self.embedding = SparseEmbedding("rows", 4, optimizer="adam", learning_rate=0.05)
        tower = nn.Sequential(nn.Flatten(), nn.Linear(8, width), nn.GELU())
        self.tower = Slow(tower, front_s)
        self.head = Slow(nn.Linear(width, 1), back_s, trace)

    def forward(self, sparse):
        return self.head(self.tower(self.embedding(sparse))).squeeze(-1)
"""
_LAYERS = {"embedding": "front", "tower": "front", "head": "back"}


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


def write_job(folder: Path, shape: Shape, **overrides: object) -> JobSpec:
    """Write the job's files; the job, which keeps two workers in each stage busy."""
    folder.mkdir(parents=True)
    (folder / "trace").mkdir()
    (folder / "model.py").write_text(_MODEL)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, _ROWS, (8 * shape.batch + 5, 2))
    lines = [f"{rng.integers(2)},{a},{b}" for a, b in keys]
    (folder / "train.csv").write_text("\n".join(["y,a,b", *lines]) + "\n")
    (folder / ".heterpsignore").write_text("*\n!model.py\n")
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
                "trace": str(folder / "trace"),
            },
        },
        "data": {"train": "train.csv", "label": "y", "sparse": ["a", "b"]},
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


def digest(spec: JobSpec, model: Path) -> str:
    """Of a saved model's weights and rows, to the bit."""
    (table,) = LocalTable.load_checkpoint(model / "tables").values()
    rows = table.pull(np.unique(np.asarray(Dataset.of(spec, "train").encoded().sparse)))
    weights = (model / "dense.safetensors").read_bytes()
    return hashlib.sha256(weights + rows.tobytes()).hexdigest()


def steps_begun(folder: Path) -> list[float]:
    """When each micro-batch's backward began in the last stage, as its layers say."""
    files = (folder / "trace").iterdir()
    return sorted(float(line.split()[0]) for f in files for line in f.read_text().splitlines())


def _highest(shape: Shape) -> float:
    """Samples a second that all units together reach."""
    return plan(_workload(shape), _resources(shape), 1e9, "exact", pin=_LAYERS).throughput


def _workload(shape: Shape) -> dict[str, Any]:
    cost = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_compute": 1.0, "parallel_sync": 1.0}
    size = max(1, shape.batch // shape.micro_batches)
    units = {"front": shape.front, "back": shape.back}
    share = {"embedding": 0.01, "tower": 0.99, "head": 1.0}
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
