"""The optimizer of a stage's dense parameters, and how learning rates change over the steps."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from protos.job_pb2 import DenseOptimizer

_FLOOR = 0.1  # share of the learning rate at which a cosine ends
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


class RateSchedule(Protocol):
    """How a learning rate changes: `train.optimizer` and `train.rows` of a job both say so."""

    @property
    def schedule(self) -> str:
        """Of constant and cosine; empty for constant."""
        ...

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        ...


def make_optimizer(
    spec: DenseOptimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The dense optimizer of a stage, None where it has no parameters."""
    if not parameters:
        return None
    options: dict[str, Any] = {
        "lr": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "foreach": True,
    }
    if spec.momentum:
        options["momentum"] = spec.momentum
    if spec.betas:
        options["betas"] = tuple(spec.betas)
    if spec.eps:
        options["eps"] = spec.eps
    return _KINDS[spec.name](parameters, **options)


def kept_by(spec: DenseOptimizer) -> tuple[str, ...]:
    """Names of what the optimizer keeps of a parameter."""
    if spec.name == "sgd":
        return ("momentum_buffer",) if spec.momentum else ()
    return ("step", "sum") if spec.name == "adagrad" else ("step", "exp_avg", "exp_avg_sq")


def make_schedule(
    spec: DenseOptimizer, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR | None:
    """What sets the learning rate after each of `steps` steps; None where it is constant."""
    if is_constant(spec):
        return None
    return LambdaLR(optimizer, lambda step: rate_factor(spec, step, steps))


def is_constant(spec: RateSchedule) -> bool:
    """Whether the factor is 1 in every step."""
    return not spec.warmup_steps and spec.schedule != "cosine"


def rate_factor(spec: RateSchedule, step: int, steps: int) -> float:
    """By what the learning rate is multiplied in step `step`, from 0, of `steps`."""
    warmup = spec.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if spec.schedule != "cosine":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2
