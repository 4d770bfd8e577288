"""A torch optimizer's rule for one expert at a time, by torch's own code.

What a step does to an element depends on no other one, so that experts one by one get the bits that
they get stacked. An expert that gets no token has gradients of zeros, which still move it where
there is momentum or decay: such steps are made up for when it is next needed, in their order and
each with the options that it had.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

OPTIMIZERS = (SGD, Adam, AdamW)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a layer's experts are updated.

    kind: of OPTIMIZERS.
    states: what the optimizer keeps of each weight, by its names, each of the weight's shape.
    counts: whether it keeps the number of steps.
    """

    kind: type[Optimizer]
    states: tuple[str, ...]
    counts: bool

    def update(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        steps: int,
        options: Mapping[str, Any],
    ) -> None:
        """One step of weights and their states, in place.

        Args:
            weights: of an expert.
            gradients: of these.
            states: of each weight, by the names of `states`.
            steps: that were made before.
            options: of the optimizer's group, as they are in this step.
        """
        parameters = [nn.Parameter(one, requires_grad=False) for one in weights]
        optimizer = _make(self.kind, [{"params": parameters, **options}])
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            if steps:
                kept: dict[str, Any] = dict(state)
                if self.counts:
                    kept["step"] = torch.tensor(float(steps))
                optimizer.state[parameter] = kept
        optimizer.step()
        if not steps:  # the first one makes its own
            for parameter, state in zip(parameters, states, strict=True):
                for name, mine in state.items():
                    mine.copy_(optimizer.state[parameter][name])

    def moves_alone(self, options: Mapping[str, Any]) -> bool:
        """Whether weights with gradients of zeros change in a step, or their states."""
        plain = self.kind is SGD and not options["momentum"] and not options["weight_decay"]
        return not plain


def rule_of(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> Rule:
    """How one of an optimizer's groups is updated; seen from a step of one number.

    Raises:
        ValueError: the optimizer is none of OPTIMIZERS, or is fused.
    """
    kind = type(optimizer)
    if kind not in OPTIMIZERS:
        names = ", ".join(one.__name__ for one in OPTIMIZERS)
        raise ValueError(f"optimizer: expected one of torch's {names}, got {kind.__name__}")
    if group.get("fused"):
        raise ValueError(
            f"optimizer: expected {kind.__name__} without fused=True, which rounds otherwise at "
            "the end of a tensor than inside"
        )
    return rule_for(kind, options_of(group), dtype)


def rule_for(kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> Rule:
    """How an optimizer with these options updates, seen from a step of one number."""
    tried = nn.Parameter(torch.zeros(1, dtype=dtype))
    tried.grad = torch.zeros_like(tried)
    trial = _make(kind, [{"params": [tried], **options}])
    trial.step()
    state = {name: one for name, one in trial.state[tried].items() if one is not None}
    states = tuple(name for name in state if name != "step")
    return Rule(kind, states, "step" in state)


def _make(kind: Callable[..., Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    return kind(groups)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as they are now, without its parameters.

    Copies: a rate that is a tensor is changed in place.
    """
    known = ("params", "initial_lr", "name", "param_names")
    return {key: deepcopy(value) for key, value in group.items() if key not in known}
