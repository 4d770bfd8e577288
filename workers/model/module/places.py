"""Where the modules of a model keep their parameters, so that others can be put in their place."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.model.code.entry import ModelError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: a module's own, or in a list or mapping that a module keeps."""

    holder: Any
    name: Any

    def put(self, tensor: Tensor) -> None:
        """Have another tensor there."""
        if isinstance(self.holder, nn.Module):
            setattr(self.holder, self.name, tensor)
        else:
            self.holder[self.name] = tensor


def parameter_places(module: nn.Module, *, besides: bool) -> dict[Tensor, list[Place]]:
    """The places of every parameter that is trained.

    Args:
        besides: whether to look for those in attributes, too, such as a list that forward uses.

    Raises:
        ModelError: one is kept where no other can be put.
    """
    places: dict[Tensor, list[Place]] = defaultdict(list)
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.requires_grad:
                places[parameter].append(Place(child, name))
    if besides:
        for child in module.modules():
            for tensor, place in _kept_besides(child):
                if tensor in places:
                    places[tensor].append(place)
    return places


def _kept_besides(module: nn.Module) -> Iterator[tuple[Tensor, Place]]:
    """The parameters that a module keeps in attributes."""
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
                yield value, Place(holder, name)
