"""Small jobs, as files. Their costs are given, which spares them their profiling."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

COST = {
    "sync_s": 1e-9,
    "transfer_s": 1e-9,
    "parallel_compute": 0.5,  # one unit is the cheapest
    "parallel_sync": 1.0,
    "memory_bytes": 1e6,
}
RESOURCES = """\
types:
  - {name: cpu, price_per_hour: 0.04, limit: 8, memory_bytes: 4.0e9, device: cpu}
  - {name: v100, price_per_hour: 1, limit: 2, memory_bytes: 1.6e10, device: cuda}
"""
CPU = "types: [{name: cpu, price_per_hour: 0.04, limit: 2, memory_bytes: 4.0e9}]\n"
CLICKS_LAYERS = ("embedding", "tower", "wide")
_CLICKS = """
import time

from torch import nn

from heterps import SparseEmbedding


class Wide(nn.Linear):
    def __init__(self, pause_s):
        super().__init__(1, 1)
        self.pause_s = pause_s

    def forward(self, x):
        if self.training:
            time.sleep(self.pause_s)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, pause_s):
        super().__init__()
        self.embedding = SparseEmbedding("rows", 4, learning_rate=0.05)
        self.tower = nn.Sequential(nn.Flatten(), nn.Linear(8, 1))
        self.wide = Wide(pause_s)

    def forward(self, sparse, dense):
        return (self.tower(self.embedding(sparse)) + self.wide(dense)).squeeze(-1)


def build(pause_s=0.0):
    return Model(pause_s)
"""
_RATINGS = """
import time

from torch import nn

from heterps import SparseEmbedding


class Head(nn.Linear):
    def __init__(self, pause_s, fails_at):
        super().__init__(16, 1)
        self.steps, self.pause_s, self.fails_at = 0, pause_s, fails_at

    def forward(self, x):
        self.steps += 1
        if self.training:
            time.sleep(self.pause_s)
        if self.fails_at and self.steps > self.fails_at:
            raise ValueError("the <b>head</b> has had enough")
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, pause_s, fails_at=0):
        super().__init__()
        self.embedding = SparseEmbedding("ids", dim=8, optimizer="adam", learning_rate=0.01)
        self.head = Head(pause_s, fails_at)

    def forward(self, sparse):
        return self.head(self.embedding(sparse).flatten(1)).squeeze(1)
"""
_RATINGS_JOB = """\
name: ratings
model: {entry: model.py:Net, args: {pause_s: PAUSE}}
data: {train: train.csv, test: train.csv, label: label, sparse: [user, item]}
train: {epochs: 1000, max_steps: STEPS, batch_size: 128, staleness: 0}
servers: {shards: 1}
schedule: {method: greedy, resources: resources.yaml, workload: workload.yaml}
"""


def write_workload(
    path: Path,
    layers: Iterable[str],
    seconds: Mapping[str, float | Mapping[str, float]],
    reference_batch: int = 256,
    samples: float = 1e6,
    ps_type: str = "cpu",
    **cost: float,
) -> Path:
    """Write what a profile would say.

    Args:
        seconds: by type, what a layer takes for the reference batch, or such by layer.
        cost: what is other than in `COST`.
    """

    def compute_s(kind: str, layer: str) -> float:
        given = seconds[kind]
        return given[layer] if isinstance(given, Mapping) else given

    costs = [
        {
            "name": layer,
            "kind": "dense",
            "cost": {k: COST | cost | {"compute_s": compute_s(k, layer)} for k in seconds},
        }
        for layer in layers
    ]
    head = {"name": "given", "reference_batch": reference_batch, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | {"ps_type": ps_type, "ps_core_s": 1e-9, "layers": costs}))
    return path


def write_clicks(folder: Path, rows: int = 4096) -> None:
    """Write model.py, whose argument `pause_s` slows it down, resources.yaml and train.csv."""
    (folder / "model.py").write_text(_CLICKS)
    (folder / "resources.yaml").write_text(RESOURCES)
    random = np.random.default_rng(0)
    a, b, x = random.integers(0, 9, rows), random.integers(0, 9, rows), random.normal(size=rows)
    lines = zip(((a % 2) + x > 0.5).astype(int), a, b, x, strict=True)
    text = "".join(f"{y},{a},{b},{x:.3f},site-{a}\n" for y, a, b, x in lines)
    (folder / "train.csv").write_text("y,a,b,x,site\n" + text)


def write_ratings(folder: Path, labels: Iterable[tuple[int, int, int]], steps: int, pause_s: float):
    """Write a job of an embedding and a head that takes `pause_s` a step, on one CPU; job.yaml."""
    rows = (f"{user},{item},{label}" for user, item, label in labels)
    (folder / "train.csv").write_text("\n".join(["user,item,label", *rows]) + "\n")
    (folder / "model.py").write_text(_RATINGS)
    (folder / "resources.yaml").write_text(CPU)
    write_workload(folder / "workload.yaml", ("embedding", "head"), {"cpu": 1e-3}, 128)
    job = _RATINGS_JOB.replace("PAUSE", str(pause_s)).replace("STEPS", str(steps))
    (folder / "job.yaml").write_text(job)
    return folder / "job.yaml"
