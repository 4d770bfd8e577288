"""Jobs whose layers sleep: real processes on a real cluster, and costs that are exact.

The last layer writes down when each of its micro-batches begins, which is what is measured: it is
the job's own word, and not that of the system under test.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.pace.questions import Question
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from scheduler.decision.record import Decision

_EPOCH = 16  # steps
_MODEL = """
import os
import time

import torch
from torch import nn

FORWARD = 1 / 3  # of what a layer takes


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds, trace):
        ctx.seconds, ctx.trace, ctx.begun = seconds * len(x), trace, time.monotonic()
        time.sleep(ctx.seconds * FORWARD)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        if ctx.trace is not None:
            ctx.trace.write(f"{ctx.begun!r} {len(gradient)}\\n")
        time.sleep(ctx.seconds * (1 - FORWARD))
        return gradient, gradient.sum().reshape(1), None, None


class Layer(nn.Module):
    def __init__(self, seconds, trace):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.trace, self.file = seconds, trace, None

    def forward(self, x):
        if self.training and self.trace:
            if self.file is None:
                self.file = open(os.path.join(self.trace, str(os.getpid())), "a", buffering=1)
        return Sleep.apply(x, self.weight, self.seconds if self.training else 0.0, self.file)


class Net(nn.Module):
    def __init__(self, seconds, trace):
        super().__init__()
        self.names = [f"layer{index}" for index in range(len(seconds))]
        for name, own in zip(self.names, seconds):
            setattr(self, name, Layer(own, trace if name == self.names[-1] else ""))

    def forward(self, dense):
        for name in self.names:
            dense = getattr(self, name)(dense)
        return dense.squeeze(1)
"""
_JOB = """\
name: pace
model: {entry: model.py:Net}
data: {train: train.csv, label: y, dense: [x]}
train: {epochs: 1000000, loss: mse, optimizer: {name: sgd, learning_rate: 1.0e-6}}
servers: {shards: 1, durability: none}
schedule: {resources: resources.json, workload: workload.json}
output: out
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Samples a second over `steps` steps in the middle of a run.

    They took from `begun` to `ended`, in seconds of the monotonic clock.
    """

    throughput: float
    steps: int
    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """That they took."""
        return self.ended - self.begun


def write_job(folder: Path, question: Question, found: Decision, steps: int) -> JobSpec:
    """Write the job of a question, whose layers sleep for what they cost where `found` has them."""
    folder.mkdir(parents=True)
    (folder / "trace").mkdir()
    (folder / "model.py").write_text(_MODEL)
    (folder / "job.yaml").write_text(_JOB)
    (folder / "workload.json").write_text(json.dumps(question.workload))
    (folder / "resources.json").write_text(json.dumps(question.resources))
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(0, 2)},{rng.normal():.3f}" for _ in range(_EPOCH * question.batch)]
    (folder / "train.csv").write_text("\n".join(["y,x", *lines]) + "\n")
    costs = zip(question.seconds, found.assignment, strict=True)
    overrides: dict[str, object] = {
        "model.args": {
            "seconds": [by_type[kind] for by_type, kind in costs],
            "trace": str(folder / "trace"),
        },
        "train.batch_size": question.batch,
        "train.max_steps": steps,
        "train.seed": question.seed,
        "train.staleness": question.staleness,
        "schedule.method": question.method,
        "schedule.min_throughput": question.floor,
    }
    if question.cap:
        overrides["schedule.max_price_per_hour"] = question.cap
    if question.micro_batches:
        overrides["train.micro_batches"] = question.micro_batches
    overrides |= {f"schedule.pin.{layer}": kind for layer, kind in question.pin.items()}
    return load_job(folder / "job.yaml", overrides)


def pace_of(trace: Path, batch: int, steps: int, warm: int, least: int = 1) -> Pace:
    """What a run came to from step `warm` to its last.

    Args:
        trace: the folder with the last layer's times.
        batch: samples a step.
        least: samples of a micro-batch; what is smaller was a trial of the model.

    Raises:
        ValueError: the last layer did not see every sample of every step once.
    """
    lines = [line.split() for file in trace.iterdir() for line in file.read_text().splitlines()]
    begun = sorted((float(time), int(rows)) for time, rows in lines if int(rows) >= least)
    seen = np.cumsum([0, *(rows for _, rows in begun)])
    if seen[-1] != batch * steps:
        raise ValueError(f"{trace}: {seen[-1]} samples, expected {steps} steps of {batch}")
    # The n-th micro-batch is the first of a step where all steps before it are through.
    first, last = (int(np.searchsorted(seen, batch * step)) for step in (warm, steps - 1))
    start, end = begun[first][0], begun[last][0]
    throughput = float(seen[last] - seen[first]) / (end - start)
    return Pace(throughput, steps - 1 - warm, start, end)
