"""What every peer's process does alike: it trains when told to, and says how fast that was.

Its standard output belongs to the answers alone. Batches lie in memory as tensors before.
"""

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.ctr.shape import BATCH, WIDTHS, Data

Batch = tuple[Tensor, Tensor, Tensor]  # rows [B, slots], numbers [B, dense], labels [B]


def batches(path: str, part: int = 0, parts: int = 1) -> list[Batch]:
    """The samples by step; of each a part."""
    data = Data.load(Path(path))
    found = []
    for at in range(0, len(data.labels), BATCH):
        own = slice(at + BATCH * part // parts, at + BATCH * (part + 1) // parts)
        arrays = (data.rows[own], data.dense[own], data.labels[own])
        rows, dense, labels = map(torch.from_numpy, arrays)
        found.append((rows, dense, labels))
    return found


def tower() -> nn.Sequential:
    """The dense layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def serve(step: Callable[[int], float], others: Sequence[int] = ()) -> None:
    """Answer commands until the input ends.

    Args:
        step: trains on the batch of a number; its loss.
        others: processes whose time counts, too.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    number = 0
    losses = [step(number := number + 1) for _ in range(5)]
    answers.write(json.dumps({"loss": losses[-1]}) + "\n")
    answers.flush()
    for line in sys.stdin:
        seconds = json.loads(line)["seconds"]
        before, began, first = _cpu(others), time.perf_counter(), number
        while time.perf_counter() - began < seconds:
            loss = step(number := number + 1)
        taken, steps = time.perf_counter() - began, number - first
        cpu = (_cpu(others) - before) / steps
        answer = {"samples_per_s": steps * BATCH / taken, "cpu_s": cpu, "loss": loss}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # some libraries do not end their threads


def _cpu(others: Sequence[int]) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in others:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
