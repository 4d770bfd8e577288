"""A model that no machine can train alone, on machines whose memory ends where they say it does."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import heterps
from heterps import Client
from tests.cluster import Roles
from tests.jobs import write_workload

pytestmark = pytest.mark.exhaustive

_MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.act = nn.Linear(width, width), nn.GELU()

    def forward(self, x):
        return x + self.act(self.inner(x))

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.begin = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.end = nn.Linear(width, 1)

    def forward(self, dense):
        x = self.begin(dense)
        for block in self.blocks:
            x = block(x)
        return self.end(x).squeeze(-1)

build = Net
"""
_JOB = """
name: wide
model: {{entry: model.py:build, args: {{width: 2048, depth: 16}}}}
data: {{path: ., train: data.csv, valid: data.csv, label: label, dense: [a, b, c, d]}}
train:
  epochs: 1
  batch_size: 32
  micro_batches: 2
  staleness: 0
  seed: 3
  optimizer: {{name: adam, learning_rate: 1.0e-5, eps: 1.0e-3}}
  loss: mse
schedule: {{method: exact, resources: resources.yaml{also}}}
output: {output}
"""
_RESOURCES = """
types: [{{name: cpu, price_per_hour: 0.04, limit: 5, memory_bytes: {memory}}}]
"""
_LAYERS = ("begin", *(f"blocks.{number}" for number in range(16)), "end")
# Weights are 269 MB, and four times that with gradients under Adam. A node and torch take some
# 300 MB, and who builds or saves the model all weights once beside its own layers.
_MACHINE_BYTES = 1_100_000_000
_UNIT_BYTES = 400_000_000  # of a machine, for what layers take: more would be a wrong price list
_BOAST_BYTES = 4_000_000_000
_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_LIMITS = ("memory.limit_in_bytes", "memory.max")


def groups() -> tuple[Path, str]:
    """Where control groups of memory can be made, and the name of a group's limit."""
    for root, limit in zip(_ROOTS, _LIMITS, strict=True):
        own = root / f"heterps-test-{os.getpid()}"
        try:
            own.mkdir()
        except OSError:
            continue
        there = (own / limit).exists()
        own.rmdir()
        if there:
            return root, limit
    pytest.skip("needs root, and control groups of memory that may be made")


@contextmanager
def machine(number: int, size: int) -> Iterator[Path]:
    """A group whose processes are killed where they take more than `size` bytes together."""
    root, limit = groups()
    group = root / f"heterps-test-{os.getpid()}-{number}"
    group.mkdir(exist_ok=True)  # of a test that failed
    try:
        (group / limit).write_text(str(size))
        yield group
    finally:
        for _ in range(100):  # those that were in it have to be gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


@contextmanager
def inside(group: Path) -> Iterator[None]:
    """What is started meanwhile is in a group, and all that it starts."""
    kind = "memory" if group.parent.name == "memory" else ""  # of version 1, else of 2
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next(name.strip("/") for _, of, name in lines if of == kind)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / own / "cgroup.procs").write_text(str(os.getpid()))


def write(folder: Path, memory: int, **schedule: str) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(_MODEL)
    torch.manual_seed(1)
    rows = torch.randn(128, 4).tolist()
    lines = [",".join(f"{value:.5f}" for value in (*row, sum(row))) for row in rows]
    (folder / "data.csv").write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    (folder / "resources.yaml").write_text(_RESOURCES.format(memory=memory))
    also = "".join(f", {key}: {value}" for key, value in schedule.items())
    (folder / "job.yaml").write_text(_JOB.format(output=folder / "out", also=also))
    return folder / "job.yaml"


def trained(folder: Path) -> nn.Module:
    """What plain PyTorch makes of it, without any limit."""
    made: dict[str, type[nn.Module]] = {}
    exec((folder / "model.py").read_text(), made)
    torch.manual_seed(3)
    model = made["Net"](2048, 16)
    table = np.genfromtxt(folder / "data.csv", delimiter=",", skip_header=1, dtype=np.float32)
    dense, label = torch.from_numpy(table[:, :4]), torch.from_numpy(table[:, 4])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, eps=1e-3)
    for batch in np.random.default_rng([3, 0]).permutation(len(table)).reshape(-1, 32):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(dense[batch]), label[batch]).backward()
        optimizer.step()
    return model


def test_a_plan_of_several_stages_trains_what_kills_a_single_one(tmp_path: Path) -> None:
    boasting = write(tmp_path / "boasting", _BOAST_BYTES, workload="workload.yaml")
    write_workload(boasting.with_name("workload.yaml"), _LAYERS, {"cpu": 1e-3})
    honest = write(tmp_path / "honest", _UNIT_BYTES)
    with Roles(tmp_path / "roles") as roles, ExitStack() as stack:
        machines = [stack.enter_context(machine(n, _MACHINE_BYTES)) for n in range(5)]
        scheduler = roles.scheduler()
        for group in machines:
            with inside(group):
                roles.node(scheduler, "cpu", "--units", "1")
        with Client(scheduler.address) as client:
            whole = client.submit(boasting)
            ended = client.wait(whole)
            assert (ended.state, ended.end_reason) == ("failed", "out_of_memory"), ended.reason
            assert len(client.decision(whole).stages) == 1
            split = client.submit(honest)
            done = client.wait(split)
            assert done.state == "succeeded", done.reason
            assert len(client.decision(split).stages) >= 3
        roles.close()  # before the machines go
    model, expected = heterps.load(done.output), trained(honest.parent)
    found = dict(model.named_parameters())
    for name, weight in expected.named_parameters():
        off = (found[name] - weight).detach().abs().max()
        assert off <= 1e-5 * weight.detach().abs().max(), (name, float(off))
