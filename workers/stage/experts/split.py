"""The experts of a job's stage split over its workers, and brought together for the saved model."""

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from workers.links.all_reduce import StageGroup
from workers.links.plain import PLAIN
from workers.moe.besides import state_besides
from workers.moe.group import ExpertGroup
from workers.moe.layer import MoE
from workers.stage.experts.outside import outside_of

_log = logging.getLogger("heterps.stage")


def split_experts(module: nn.Module, group: StageGroup) -> list[str]:
    """Split every MoE layer of a stage over its workers, which all call this; their names.

    Layers of fewer experts than workers stay whole, and with one worker all do.

    Raises:
        RuntimeError: the workers are on several hosts, without collectives between them.
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, MoE)}
    if group.size == 1 or not layers:
        return []
    if not group.has_processes:
        raise RuntimeError(
            "train.split_experts: the workers of this stage are on several hosts; expected a plan "
            f"with all of them on one, or {PLAIN}=1 on every node"
        )
    processes = ExpertGroup()
    split = []
    for name, layer in layers.items():
        if layer.num_experts < group.size:
            _log.info("%s stays whole: %d experts, %d workers", name, layer.num_experts, group.size)
            continue
        layer.split(processes)
        split.append(name)
    return split


def whole_state(module: nn.Module, group: StageGroup) -> dict[str, Tensor]:
    """The module's state with the experts of all workers, who all call this, as if never split.

    Experts that are out of memory are not among it.
    """
    with state_besides():
        state: dict[str, Tensor] = dict(module.state_dict())
    for prefix, layer in _split_layers(module):
        for key in [k for k in state if _of_experts(k, prefix)]:
            del state[key]
        state.update((prefix + key, value) for key, value in _whole_experts(layer, group))
    return state


def state_bytes(module: nn.Module) -> int:
    """Of a module's state, with experts that are out of memory."""
    with state_besides():
        inside: int = sum(one.nbytes for one in module.state_dict().values())
    outside = outside_of(module)
    return inside + (0 if outside is None else outside.weight_bytes)


def whole_optimizer(
    module: nn.Module,
    group: StageGroup,
    optimizer: Mapping[str, Mapping[str, Tensor]],
    kept: Sequence[str],
) -> dict[str, dict[str, Tensor]]:
    """What all workers' optimizers keep, who all call this, as if experts had never been split.

    Args:
        optimizer: parameter -> name -> what this worker's keeps of it.
        kept: these names.

    Raises:
        RuntimeError: experts in one parameter have learned in different steps.
    """
    whole = {name: dict(some) for name, some in optimizer.items()}
    for prefix, layer in _split_layers(module):
        for name in [name for name in whole if _of_experts(name, prefix)]:
            del whole[name]
        if layer.experts is None:
            for own, weights in (("w1", layer.w1), ("w2", layer.w2)):
                one = optimizer.get(prefix + own)
                each = [
                    {k: v if v.ndim == 0 else v[number] for k, v in one.items()} if one else None
                    for number in range(len(weights))
                ]
                gathered = _gathered(group, each, weights[0], kept)
                known = [some for some in gathered if some is not None]
                if known:
                    whole[prefix + own] = _together(prefix + own, gathered, known)
            continue
        for key, parameter in layer.experts[0].named_parameters():
            names = [f"{prefix}experts.{number}.{key}" for number in range(len(layer.experts))]
            gathered = _gathered(group, [optimizer.get(n) for n in names], parameter, kept)
            for number, some in enumerate(gathered):
                if some is not None:
                    whole[f"{prefix}experts.{number}.{key}"] = some
    return whole


def own_optimizer(
    module: nn.Module, whole: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Mapping[str, Tensor]]:
    """The other way round: what this worker's optimizer is to keep."""
    own = dict(whole)
    if (outside := outside_of(module)) is not None:
        for name in outside.names:
            own.pop(name, None)
    for prefix, layer in _split_layers(module):
        assert layer.parallel is not None
        experts = layer.parallel.own
        for name in [name for name in whole if _of_experts(name, prefix)]:
            kept = own.pop(name)
            if layer.experts is None:
                first, last = experts.start, experts.stop
                own[name] = {k: v if v.ndim == 0 else v[first:last] for k, v in kept.items()}
                continue
            number, _, key = name.removeprefix(f"{prefix}experts.").partition(".")
            if int(number) in experts:
                own[f"{prefix}experts.{int(number) - experts.start}.{key}"] = kept
    return own


def own_state(module: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a state of `whole_state` this worker has."""
    own = own_optimizer(module, {name: {"": tensor} for name, tensor in whole.items()})
    return {name: kept[""] for name, kept in own.items()}


def _split_layers(module: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, layer in module.named_modules():
        if isinstance(layer, MoE) and layer.parallel is not None:
            yield f"{name}." if name else "", layer


def _gathered(
    group: StageGroup,
    own: Sequence[Mapping[str, Tensor] | None],
    parameter: Tensor,
    kept: Sequence[str],
) -> list[dict[str, Tensor] | None]:
    """What is kept of each expert of all workers, of those of this one; None: nothing."""
    there = group.gather(torch.tensor([some is not None for some in own], dtype=torch.int64))
    columns = {}
    for key in kept:
        shape = () if key == "step" else parameter.shape
        empty = torch.zeros(shape, dtype=torch.float32 if key == "step" else parameter.dtype)
        each = [some[key].detach().cpu() if some is not None else empty for some in own]
        columns[key] = group.gather(torch.stack(each))
    return [
        {key: column[number].clone() for key, column in columns.items()} if known else None
        for number, known in enumerate(there.tolist())
    ]


def _together(
    name: str, gathered: list[dict[str, Tensor] | None], known: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What is kept of one parameter that stacks all experts."""
    first = known[0]
    alike = all(torch.equal(some[k], v) for some in known for k, v in first.items() if v.ndim == 0)
    if len(known) < len(gathered) or not alike:
        raise RuntimeError(f"{name!r}: its experts have learned in different steps on each worker")
    return {
        key: value if value.ndim == 0 else torch.stack([some[key] for some in known])
        for key, value in first.items()
    }


def _of_experts(key: str, prefix: str) -> bool:
    own = key.removeprefix(prefix)
    return key.startswith(prefix) and (own in ("w1", "w2") or own.startswith("experts."))


def _whole_experts(layer: MoE, group: StageGroup) -> Iterator[tuple[str, Tensor]]:
    """What each worker has of the experts, in the order of the ranks: that of the experts."""
    if layer.experts is None:
        for name, weights in (("w1", layer.w1), ("w2", layer.w2)):
            yield name, group.gather(weights.detach())
        return
    states = [expert.state_dict() for expert in layer.experts]
    for key in states[0]:
        whole = group.gather(torch.stack([state[key].detach() for state in states]))
        for number, value in enumerate(whole):
            yield f"experts.{number}.{key}", value
