"""The model of the jobs under plain PyTorch: each worker has all of it, and a share of the data.

A worker has as much to do for a sample as a worker of each stage together, and there are as many
workers as in all stages, so the pace is the same.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent / "code"))
from sleeping import Slow

State = dict[str, Any]
_KEYS, _COLUMNS = 40, 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained.

    Attributes:
        folder: of the checkpoints.
        trace: where layers tell of their work.
        front_s, back_s: that a sample takes in each half.
        samples: of an epoch.
        every: steps between two checkpoints.
    """

    folder: str
    trace: str
    workers: int
    front_s: float
    back_s: float
    width: int
    samples: int
    batch: int
    steps: int
    every: int


def settings_of(file: str) -> Settings:
    """What a file of JSON has."""
    return Settings(**json.loads(Path(file).read_text()))


class Plain(nn.Module):
    """Its rows are weights like others."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embedding = nn.Embedding(_KEYS * _COLUMNS, 4)
        tower = nn.Sequential(nn.Flatten(), nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU())
        self.tower = Slow(tower, settings.front_s)
        self.head = Slow(nn.Linear(width, 1), settings.back_s, settings.trace)

    def forward(self, keys: Tensor) -> Tensor:
        """Scores [n] of keys [n, 2]."""
        scores: Tensor = self.head(self.tower(self.embedding(keys))).squeeze(-1)
        return scores


def train(
    settings: Settings, rank: int, load: Callable[[State], int], save: Callable[[State, int], None]
) -> None:
    """Train from where `load` says; `save` every so many steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(_COLUMNS) * _KEYS
    keys = torch.randint(0, _KEYS, (settings.samples, _COLUMNS), generator=generator) + offsets
    labels = torch.randint(0, 2, (settings.samples,), generator=generator).float()
    model = DistributedDataParallel(Plain(settings))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state: State = {"model": model.module, "optimizer": optimizer}
    steps_per_epoch = -(-settings.samples // settings.batch)
    for step in range(load(state), settings.steps):
        first = step % steps_per_epoch * settings.batch
        own = torch.arange(first, min(first + settings.batch, settings.samples))
        own = own.tensor_split(settings.workers)[rank]
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(keys[own]), labels[own])
        loss.backward()
        optimizer.step()
        if (step + 1) % settings.every == 0:
            save(state, step + 1)
