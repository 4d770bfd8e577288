"""Training with experts and their states out of memory, beside training in memory, in turns."""

import copy
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam

from bench.beyond.contestants import HIDDEN, WIDTH, Big, inputs
from bench.beyond.turns import Disk
from heterps import offload_training
from workers.offload.experts.layout import view_of
from workers.offload.experts.packed import PackedExperts

LAYERS, EXPERTS, BATCH, OVER = 3, 32, 256, 4  # OVER: the model with its states is so many memories
_WEIGHTS = 2 * WIDTH * HIDDEN * 4  # bytes of an expert
MEMORY = 3 * _WEIGHTS * EXPERTS * LAYERS // OVER


def rounds(work: Path, count: int, is_over: Callable[[], bool]) -> dict[str, Any]:
    """So many steps of each, or fewer, and whether the weights are the same after them."""
    torch.manual_seed(0)
    resident = Big(layers=LAYERS)
    model = copy.deepcopy(resident)
    theirs, ours = Adam(resident.parameters()), Adam(model.parameters())
    found: dict[str, Any] = {"memory": MEMORY, "batch": BATCH, "rounds": []}
    with tempfile.TemporaryDirectory(dir=work, prefix="training-") as folder:
        path = Path(folder) / "experts"
        handle = offload_training(model, ours, MEMORY, path=path)
        disk = Disk(work)
        with handle:
            for number in range(count + 1):
                before = disk.speed(0.3), write_speed(Path(folder) / "scratch")
                taken = step(resident, theirs, number)
                stats, written = handle.stats, handle.bytes_written
                told = {
                    "resident": taken,
                    "seconds": step(model, ours, number),
                    "written": handle.bytes_written - written,
                }
                since = handle.stats - stats
                told |= {"read": since.bytes_read, "waited": since.waited}
                after = disk.speed(0.3), write_speed(Path(folder) / "scratch")
                told["disk"], told["disk_writes"] = zip(before, after, strict=True)
                if number:  # in the first one both make their states
                    found["rounds"].append(told)
                if is_over():
                    break
            handle.save(Path(folder) / "saved")
        found["equal"] = equal(Path(folder) / "saved", resident)
    return found


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, batch: int = BATCH
) -> float:
    """Seconds of one."""
    x = inputs(number, batch)
    begin = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - begin


def equal(path: Path, resident: nn.Module) -> bool:
    """Whether a file has a model's experts, bit for bit."""
    theirs = dict(resident.named_parameters())
    with PackedExperts(path) as packed:
        return all(
            torch.equal(one, theirs[f"{layer.name}.{name}"][e])
            for layer in packed.layers
            for e in range(layer.experts)
            for name, one in packed.expert(layer.name, e).items()
        )


def write_speed(path: Path, seconds: float = 0.3) -> float:
    """Bytes a second of writes as they are made when an expert gives way, one after the other."""
    size = 3 * _WEIGHTS
    memory = torch.zeros(size + 4096, dtype=torch.uint8)
    view = view_of(memory[-memory.data_ptr() % 4096 :][:size])
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        os.posix_fallocate(file, 0, 8 * size)
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            done += os.pwritev(file, [view], done // size % 8 * size)
        return done / (time.perf_counter() - begin)
    finally:
        os.close(file)
