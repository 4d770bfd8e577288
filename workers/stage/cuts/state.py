"""What training has made of a stage's layers: captured after a step, and given to layers anew.

All of it goes by the names that layers and parameters have in the model, so it fits any plan; and
it is tensors in memory, wherever they come from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from workers.links.all_reduce import StageGroup
from workers.model.chain.graph import StageGraph
from workers.model.code.entry import ModelError
from workers.model.module.state import load_state, single
from workers.model.saved.cut import OPTIMIZER, WEIGHTS, UnfitCutError
from workers.moe.besides import state_besides
from workers.moe.gates import Bias
from workers.moe.layer import MoE
from workers.stage.experts.outside import outside_of
from workers.stage.experts.split import whole_optimizer, whole_state
from workers.stage.update.update import Update

_BUFFERS, _EARLIER = "buffers", "earlier-"
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StageState:
    """Of some layers, on the host.

    Attributes:
        weights: what their state_dict has.
        buffers: those that it leaves out.
        optimizer: what the optimizer keeps of each parameter; nothing of one without a gradient.
        earlier: parameters as they were one update before, two, ...: S for a staleness of S.
    """

    weights: Tensors
    buffers: Tensors = field(default_factory=dict)
    optimizer: Mapping[str, Tensors] = field(default_factory=dict)
    earlier: tuple[Tensors, ...] = ()

    def by_layer(self, layers: Iterable[str]) -> dict[str, dict[str, Tensors]]:
        """Layer -> kind -> tensors; what belongs to no layer has an empty name.

        Args:
            layers: names of all layers of the model.
        """
        names = set(layers)
        found: dict[str, dict[str, Tensors]] = {}
        kept = {f"{key}:{of}": t for of, some in self.optimizer.items() for key, t in some.items()}
        kinds = {WEIGHTS: self.weights, _BUFFERS: self.buffers, OPTIMIZER: kept}
        kinds |= {f"{_EARLIER}{age}": some for age, some in enumerate(self.earlier, 1)}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                path = name.partition(":")[2] if kind == OPTIMIZER else name
                found.setdefault(_layer(path, names), {}).setdefault(kind, {})[name] = tensor
        return found

    @staticmethod
    def of_layers(layers: Iterable[Mapping[str, Tensors]]) -> "StageState":
        """The state of some layers, each by kind."""
        kinds: dict[str, Tensors] = {}
        for layer in layers:
            for kind, tensors in layer.items():
                kinds.setdefault(kind, {}).update(tensors)
        optimizer: dict[str, Tensors] = {}
        for name, tensor in kinds.get(OPTIMIZER, {}).items():
            key, _, path = name.partition(":")
            optimizer.setdefault(path, {})[key] = tensor
        ages = sum(kind.startswith(_EARLIER) for kind in kinds)
        earlier = tuple(kinds.get(f"{_EARLIER}{age}", {}) for age in range(1, ages + 1))
        return StageState(kinds.get(WEIGHTS, {}), kinds.get(_BUFFERS, {}), optimizer, earlier)


def base_names(layers: Iterable[str]) -> list[str]:
    """The names of modules that are layers, each once: `name#2` is a second call of `name`."""
    return list(dict.fromkeys(layer.partition("#")[0] for layer in layers))


def capture(
    graph: StageGraph, group: StageGroup, update: Update, step: int, *, everywhere: bool = False
) -> StageState | None:
    """The state of a stage right after `step` steps were taken; None but at its rank 0.

    All workers of the stage call it where they share out experts; else those of other ranks have
    nothing to do.

    Args:
        everywhere: also at other ranks, which have the same; not where experts are shared out.
    """
    split = any(isinstance(m, MoE) and m.parallel is not None for m in graph.module.modules())
    if group.rank != 0 and not split and not everywhere:
        return None
    with update.as_of(step):
        weights = {**whole_state(graph.module, group), **graph.uncalled}
        optimizer: Mapping[str, Tensors] = update.optimizer_state()
        if split:
            optimizer = whole_optimizer(graph.module, group, optimizer, update.kept)
        if group.rank != 0 and not everywhere:
            return None
        outside = outside_of(graph.module)
        experts, kept_of = ({}, {}) if outside is None else outside.state()
        return StageState(
            {**_copies(single(weights)), **experts},
            _copies(_buffers(graph.module)),
            {**{name: _copies(kept) for name, kept in optimizer.items()}, **kept_of},
            tuple(_copies(some) for some in update.earlier(step)),
        )


def give(graph: StageGraph, state: StageState) -> None:
    """Give a stage's layers their weights and buffers, which are on the host.

    Raises:
        UnfitCutError: they are of other names or shapes.
    """
    weights = dict(state.weights)
    names = _names(graph.module)
    with torch.no_grad(), state_besides():
        own = set(graph.module.state_dict())
        for name, tensor in graph.uncalled.items():
            if name in weights and name not in own:
                _fits(name, weights[name], tensor)
                tensor.copy_(weights.pop(name))
        for name, value in weights.items():
            if name in names:
                _fits(name, value, names[name])
        try:
            load_state(graph.module, weights)
        except ModelError as error:
            raise UnfitCutError(str(error)) from None
        for name, value in state.buffers.items():
            path, _, own_name = name.rpartition(".")
            buffers = graph.module.get_submodule(path)._buffers
            before = buffers.get(own_name)
            buffers[own_name] = value.to(
                value.device if before is None else before.device, copy=True
            )


def _layer(name: str, layers: set[str]) -> str:
    """The innermost layer that a tensor belongs to."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _buffers(module: nn.Module) -> Tensors:
    """Buffers that the state_dict leaves out; not those that a step counts in."""
    with state_besides():
        left_out = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    left_out |= {id(m.pending) for m in module.modules() if isinstance(m, Bias)}
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if id(buffer) not in left_out and buffer.layout == torch.strided
    }


def _names(module: nn.Module) -> Tensors:
    every = dict(module.named_buffers(remove_duplicate=False))
    return {**every, **dict(module.named_parameters(remove_duplicate=False))}


def _fits(name: str, value: Tensor, into: Tensor) -> None:
    if value.shape != into.shape or value.dtype != into.dtype:
        raise UnfitCutError(
            f"{name!r}: {value.dtype} {list(value.shape)} in the cut; the model has {into.dtype} "
            f"{list(into.shape)}"
        )


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
