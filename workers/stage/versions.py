"""Versions of a stage's dense parameters: S+1 for a staleness of S (PipeDream-2BW, generalised).

Step t computes on W^max(0, t-S), the weights after that many updates, while the steps before it are
still under way. Version `t mod (S+1)` holds what step t computes on and collects its gradient. Once
step t is over it takes the newest weights and the optimizer's step, and is then what step t+S+1
computes on. With S = 0 there is the module's own version and nothing is copied.

A version is put into the module before each forward and backward: a backward may run the forward
again to save memory. Autograd keeps the tensors that it was given, whichever are in place since.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.entry import ModelError
from workers.moe.gates import Bias


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: a module's own, or in a list or mapping that a module keeps."""

    holder: Any
    name: Any

    def put(self, tensor: Tensor) -> None:
        if isinstance(self.holder, nn.Module):
            setattr(self.holder, self.name, tensor)
        else:
            self.holder[self.name] = tensor


class Versions:
    """The tensors that training changes, in as many versions as steps may be open at once.

    Args:
        module: whose parameters are the first version.
        staleness: updates that a step lacks.

    Raises:
        ModelError: a parameter is also kept where no other version can be put.
    """

    def __init__(self, module: nn.Module, staleness: int) -> None:
        self._count = staleness + 1
        self._places: dict[Tensor, list[_Place]] = defaultdict(list)
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places[parameter].append(_Place(child, name))
        if staleness:
            for child in module.modules():
                for tensor, place in _kept_besides(child):
                    if tensor in self._places:
                        self._places[tensor].append(place)
        self._first_buffer = len(self._places)
        for child in module.modules():
            if isinstance(child, Bias):  # its bias moves once a step, as a parameter does
                self._places[child.bias].append(_Place(child, "bias"))
        self._tensors: list[list[Tensor]] = [list(self._places)]
        self._where = list(self._places.values())
        self._in_place = 0

    def open(self) -> None:
        """Make the further versions of the first, which must not change before its first step."""
        first = self._tensors[0]
        self._tensors += [[_copy(t) for t in first] for _ in range(self._count - 1)]

    def parameters(self, step: int) -> list[nn.Parameter]:
        """What a step computes on and collects its gradient in."""
        return self._tensors[step % self._count][: self._first_buffer]  # type: ignore[return-value]

    def use(self, step: int) -> None:
        """Put the version of a step into the module."""
        number = step % self._count
        if number == self._in_place:
            return
        self._in_place = number
        for tensor, places in zip(self._tensors[number], self._where, strict=True):
            for place in places:
                place.put(tensor)

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Give the version of a step, which is over, the weights after the steps before it.

        The module has it then, and the optimizer is to change it in place.
        """
        if step > 0 and self._count > 1 and self._where:
            newest = self._tensors[(step - 1) % self._count]
            torch._foreach_copy_(self._tensors[step % self._count], newest)
        self.use(step)


def rekey(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Have an optimizer go on with these in place of its parameters, in the same order."""
    (group,) = optimizer.param_groups
    before, after = group["params"], list(parameters)
    if before[0] is after[0]:
        return
    for old, new in zip(before, after, strict=True):
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
    group["params"] = after


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied)
        copied.__dict__.update(tensor.__dict__)  # tags
    return copied


def _kept_besides(module: nn.Module) -> Iterator[tuple[Tensor, _Place]]:
    """The parameters that a module keeps in attributes, as in a list that its forward uses."""
    looked_at = {id(module._parameters)}
    waiting: list[Any] = [vars(module)]
    while waiting:
        holder = waiting.pop()
        if id(holder) in looked_at:
            continue
        looked_at.add(id(holder))
        for name, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, dict | list | tuple):
                waiting.append(value)
            elif isinstance(value, nn.Parameter):
                if isinstance(holder, tuple):
                    raise ModelError(
                        f"{type(module).__name__}: a tuple in it has parameters, which cannot be "
                        "exchanged for those of another step; expected a list, an "
                        "nn.ParameterList, or train.staleness: 0"
                    )
                yield value, _Place(holder, name)
