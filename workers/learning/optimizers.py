"""The optimizer of a stage's dense parameters, and how learning rates change over the steps."""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from protos.job_pb2 import DenseOptimizer, ParameterGroup
from workers.uncompiled import uncompiled

_NUMBERS = "numbers"  # of a group's parameters among all
_SHOWN = 8  # names of parameters
_FLOOR = 0.1  # share of the learning rate at which a cosine ends


class _Uncompiled(torch.optim.Optimizer):
    add_param_group = uncompiled(torch.optim.Optimizer.add_param_group)
    zero_grad = uncompiled(torch.optim.Optimizer.zero_grad)
    state_dict = uncompiled(torch.optim.Optimizer.state_dict)
    load_state_dict = uncompiled(torch.optim.Optimizer.load_state_dict)


class _Adam(_Uncompiled, torch.optim.Adam):
    step = torch.no_grad()(uncompiled(torch.optim.Adam.step))


class _AdamW(_Uncompiled, torch.optim.AdamW):
    step = torch.no_grad()(uncompiled(torch.optim.AdamW.step))


class _SGD(_Uncompiled, torch.optim.SGD):
    step = torch.no_grad()(uncompiled(torch.optim.SGD.step))


class _Adagrad(_Uncompiled, torch.optim.Adagrad):
    step = torch.no_grad()(uncompiled(torch.optim.Adagrad.step))


_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": _Adam,
    "adamw": _AdamW,
    "sgd": _SGD,
    "adagrad": _Adagrad,
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


class GroupError(ValueError):
    """Groups of parameters that overlap, or that no parameter is in."""


def make_optimizer(
    spec: DenseOptimizer, parameters: list[nn.Parameter], names: Sequence[Sequence[str]] = ()
) -> torch.optim.Optimizer | None:
    """The dense optimizer of a stage, None where it has no parameters.

    Args:
        names: of each parameter all that it goes by, for `groups`.

    Raises:
        GroupError: a parameter is in two groups.
    """
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
    members: dict[str, list[int]] = {}
    for number in range(len(parameters)):
        members.setdefault(group_of(spec, names[number]) if names else "", []).append(number)
    groups = []
    for pattern, numbers in members.items():
        group = {"params": [parameters[number] for number in numbers], _NUMBERS: numbers}
        own = spec.groups[pattern] if pattern else ParameterGroup()
        if own.HasField("learning_rate"):
            group["lr"] = own.learning_rate
        if own.HasField("weight_decay"):
            group["weight_decay"] = own.weight_decay
        groups.append(group)
    return _KINDS[spec.name](groups, **options)


def group_of(spec: DenseOptimizer, names: Sequence[str]) -> str:
    """The pattern of the group that a parameter of these names is in; empty: none.

    Raises:
        GroupError: it is in two.
    """
    found = [
        pattern
        for pattern in sorted(spec.groups)
        if any(fnmatchcase(name, pattern) for name in names)
    ]
    if len(found) > 1:
        raise GroupError(
            f"train.optimizer.groups: {names[0]!r} is in {found[0]!r} and in {found[1]!r}; "
            "expected one group at most for each parameter"
        )
    return found[0] if found else ""


def check_groups(spec: DenseOptimizer, names: Sequence[Sequence[str]]) -> None:
    """Check the groups against all dense parameters of a model.

    Raises:
        GroupError: one of them is in two groups, or none is in some group.
    """
    used = {group_of(spec, own) for own in names}
    for pattern in sorted(set(spec.groups) - used):
        some = ", ".join(own[0] for own in names[:_SHOWN]) or "none"
        raise GroupError(
            f"train.optimizer.groups: no dense parameter of the model is named {pattern!r}; there "
            f"are {some}{', …' if len(names) > _SHOWN else ''}"
        )


def rekey(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have an optimizer go on with these in place of its parameters, in the order of its making."""
    for group in optimizer.param_groups:
        before, after = group["params"], [parameters[number] for number in group[_NUMBERS]]
        if before[0] is after[0]:
            return
        for old, new in zip(before, after, strict=True):
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
        group["params"] = after


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
