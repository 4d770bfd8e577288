"""What layers of a model have in common: parameters, buffers, submodules or an embedding's table.

A gradient or a row that two layers make is one only where both are in one stage, so such layers,
and all between them, may not be cut apart.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.code.entry import ModelError


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two layers that have something in common.

    Attributes:
        first, last: their numbers.
        what: the parameter's or module's dotted name, or the table.
    """

    first: int
    last: int
    what: str


def find_sharing(
    model: nn.Module, layers: Sequence[nn.Module], read: Sequence[Iterable[str]]
) -> tuple[Sharing, ...]:
    """What is shared, each thing once, between the first and the last layer that has it.

    Args:
        layers: the modules called, in order; one that is called twice stands there twice.
        read: dotted names of the parameters and buffers that each layer's operations read directly.
    """
    names = _names(model)
    seen: dict[Hashable, list[int]] = {}
    for index, (layer, direct) in enumerate(zip(layers, read, strict=True)):
        own = {*_own(layer), *(id(_tensor(model, name)) for name in direct)}
        for thing in own:
            seen.setdefault(thing, []).append(index)
    found: dict[tuple[int, int], str] = {}
    for thing, where in seen.items():
        if where[0] != where[-1]:
            found.setdefault((where[0], where[-1]), names.get(thing, str(thing)))
    return tuple(Sharing(*ends, what) for ends, what in sorted(found.items()))


def uncut_of(sharing: Iterable[Sharing], layers: int) -> tuple[bool, ...]:
    """For each layer, whether it stays in one stage with the next."""
    uncut = [False] * layers
    for shared in sharing:
        uncut[shared.first : shared.last] = [True] * (shared.last - shared.first)
    return tuple(uncut)


def check_ties(model: nn.Module) -> None:
    """Refuse parameters that lie in the same memory without being one parameter.

    Each would have an update of its own, and the saved model two copies.

    Raises:
        ModelError: names both, and how to tie them.
    """
    by_place: dict[tuple[int, str], tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        place = (parameter.data_ptr(), str(parameter.device))
        first, other = by_place.setdefault(place, (name, parameter))
        if other is not parameter:
            raise ModelError(
                f"{type(model).__name__}: {name!r} has the memory of {first!r} and is another "
                f"parameter; tie them as one:\n    self.{name} = self.{first}"
            )


def _own(layer: nn.Module) -> Iterable[Hashable]:
    for module in layer.modules():
        # A module without state, such as an activation, may serve anywhere.
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            yield id(module)
        if isinstance(module, SparseEmbedding):
            yield module.spec.table
    yield from map(id, layer.parameters())
    yield from map(id, layer.buffers())


def _names(model: nn.Module) -> dict[Hashable, str]:
    """What to call each thing: a parameter before the module that it is in."""
    names: dict[Hashable, str] = {}
    for module_name, module in model.named_modules():
        names[id(module)] = module_name
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
    for name, buffer in model.named_buffers():
        names[id(buffer)] = name
    return names


def _tensor(model: nn.Module, name: str) -> object:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)
