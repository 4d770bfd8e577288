"""A job whose life tests watch: tiny, of given costs, and each of its steps leaves a line."""

from pathlib import Path

from protos.decision_pb2 import Layer, LayerCost
from protos.job_pb2 import JobSpec

# Each line is the process that computed. The gate holds a worker back before it is ready, halfway
# holds it in its middle.
_MODEL = """
import os
import time
from pathlib import Path

from torch import nn


class Slow(nn.Linear):
    def __init__(self, log, pause_s, halfway, half):
        super().__init__(1, 1)
        self.log, self.pause_s = log, pause_s
        self.steps, self.halfway, self.half = 0, halfway, half

    def forward(self, x):
        if self.training:
            time.sleep(self.pause_s)
            while self.halfway and self.steps == self.half and not Path(self.halfway).exists():
                time.sleep(0.05)
            self.steps += 1
            line = f"{os.getpid()}\\n".encode()
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line)
            os.close(descriptor)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.only = Slow(*arguments)

    def forward(self, sparse, dense):
        return self.only(dense).squeeze(-1)


def build(log, pause_s=0.05, gate="", error="", halfway="", half=0):
    while gate and not Path(gate).exists():
        time.sleep(0.05)
    if error:
        raise ValueError(error)
    return Model(log, pause_s, halfway, half)
"""
BATCH = 16


def prepare(directory: Path, steps: int = 40) -> None:
    """Write the model and the data, `steps` batches of it."""
    (directory / "model.py").write_text(_MODEL)
    (directory / ".heterpsignore").write_text("*\n!model.py\n")  # the rest is the test's own
    rows = [f"{i % 2},{i % 7}" for i in range(steps * BATCH)]
    (directory / "train.csv").write_text("\n".join(["y,x", *rows]) + "\n")


def log_of(directory: Path, name: str) -> Path:
    """Where the steps of the job `name` leave their lines."""
    return directory / f"{name}.steps"


def steps_of(log: Path) -> list[int]:
    """The process of each step that was computed, in order."""
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def job(directory: Path, name: str, **arguments: object) -> JobSpec:
    """A job of one layer on one unit of type cpu."""
    spec = JobSpec(name=name, directory=str(directory), output="output")
    spec.model.entry = "model.py:build"
    spec.model.args.update({"log": str(log_of(directory, name)), **arguments})
    spec.data.path, spec.data.train, spec.data.label = str(directory), "train.csv", "y"
    spec.data.dense.append("x")
    spec.train.epochs, spec.train.batch_size, spec.train.loss = 1, BATCH, "bce_with_logits"
    spec.train.micro_batches = 1
    spec.train.optimizer.name, spec.train.optimizer.learning_rate = "sgd", 0.01
    spec.schedule.method = "exact"
    spec.schedule.offered.types.add(
        name="cpu", device="cpu", price_per_hour=1.0, limit=1, memory_bytes=1e9
    )
    cost = {"cpu": LayerCost(compute_s=0.1, parallel_compute=0.9, memory_bytes=1.0)}
    spec.schedule.given.name = "given"
    spec.schedule.given.reference_batch, spec.schedule.given.samples = 100, 1000
    spec.schedule.given.layers.append(Layer(name="only", kind="dense", cost=cost))
    return spec
