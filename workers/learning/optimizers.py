"""The optimizer of a stage's dense parameters, and how its learning rate changes over the steps."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from protos.job_pb2 import DenseOptimizer, RowSchedule

_FLOOR = 0.1  # share of the learning rate at which a cosine ends


def make_optimizer(
    spec: DenseOptimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The dense optimizer of a stage, None where it has no parameters."""
    if not parameters:
        return None
    options = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay, "foreach": True}
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    return kinds[spec.name](parameters, **options)


def make_schedule(
    spec: DenseOptimizer, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR | None:
    """What sets the learning rate after each of `steps` steps; None where it is constant."""
    if not spec.warmup_steps and spec.schedule != "cosine":
        return None
    return LambdaLR(optimizer, lambda step: rate_factor(spec, step, steps))


def rate_factor(spec: DenseOptimizer | RowSchedule, step: int, steps: int) -> float:
    """By which the learning rate is multiplied in a step of `steps`."""
    warmup = spec.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if spec.schedule != "cosine":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2
