"""The experts of a job's stage split over its workers, and brought together for the saved model."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.links.all_reduce import StageGroup
from workers.links.plain import PLAIN
from workers.moe.group import ExpertGroup
from workers.moe.layer import MoE

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
    """The module's state with the experts of all workers, who all call this, as if never split."""
    state: dict[str, Tensor] = dict(module.state_dict())
    for name, layer in module.named_modules():
        if isinstance(layer, MoE) and layer.parallel is not None:
            prefix = f"{name}." if name else ""
            for key in [k for k in state if _of_experts(k, prefix)]:
                del state[key]
            state.update((prefix + key, value) for key, value in _whole_experts(layer, group))
    return state


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
