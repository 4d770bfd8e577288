"""Which models a job can train with their experts out of memory; asked before anything is."""

import os
from collections import Counter
from collections.abc import Iterable

from torch import nn

from protos.job_pb2 import JobSpec
from workers.learning.optimizers import kept_by
from workers.model.code.entry import ModelError
from workers.moe.layer import MoE
from workers.offload.experts.layout import ExpertFileError, LayerAt, placed
from workers.offload.experts.source import of_model
from workers.offload.experts.updates import Rule
from workers.offload.running.size import bytes_of
from workers.offload.training.gathered import with_gradients
from workers.offload.training.offload_training import DTYPES, least_in, slots_in

MEMORY = "train.offload.memory"
_REMEDY = "or leave train.offload out"


def check_suited(job: JobSpec, model: nn.Module, layers: Iterable[str]) -> None:
    """Refuse what cannot be trained out of memory; nothing where a job does not ask for it.

    Args:
        layers: the names of the model's layers.

    Raises:
        ModelError: names the layer, what was expected, and the remedy.
    """
    if not job.train.offload.memory:
        return
    where = type(model).__name__
    mixtures = {name: one for name, one in model.named_modules() if isinstance(one, MoE)}
    if not mixtures:
        raise ModelError(
            f"train.offload: {where} has no heterps.MoE layer; expected one, {_REMEDY}"
        )
    used = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    again = {name.partition("#")[0] for name in layers if "#" in name}
    for name, layer in mixtures.items():
        said = _wrong(layer, used)
        if any(f"{name}.".startswith(f"{one}.") for one in again):
            said = "one call of it in a forward, got several"
        if said:
            raise ModelError(f"train.offload: {where}: {name}: expected {said}; {_REMEDY}")
    if os.environ.get("HETERPS_GROUPED_FFN") == "loop":
        raise ModelError(
            f"train.offload: expected native kernels, got HETERPS_GROUPED_FFN=loop; {_REMEDY}"
        )
    rooms, places = rooms_of(job, model), layers_at(job, model)
    total = sum(at.extent * at.experts for at in places)
    enough = max(
        (-(-least_in([at]) * total // (at.extent * at.experts)) for at in places), default=0
    )
    for at in places:
        try:
            slots_in(rooms[at.name], [at], f"{MEMORY}: {at.name}'s share")
        except ValueError as error:
            raise ModelError(f"{error}; all have enough of {enough} in all") from None


def rooms_of(job: JobSpec, model: nn.Module) -> dict[str, int]:
    """Bytes of memory for each layer's experts, by the layer: its share of what there is for all.

    So a stage takes what its layers take, however a plan cuts the model.
    """
    layers = layers_at(job, model)
    total = sum(layer.extent * layer.experts for layer in layers)
    memory = bytes_of(job.train.offload.memory, MEMORY)
    return {one.name: memory * one.extent * one.experts // total for one in layers}


def layers_at(job: JobSpec, model: nn.Module) -> tuple[LayerAt, ...]:
    """Where a job's experts would lie in a file of them.

    Raises:
        ModelError: there are none.
    """
    names = kept_by(job.train.optimizer)
    rule = Rule(object, tuple(one for one in names if one != "step"), "step" in names)  # type: ignore[arg-type]
    try:
        return placed(with_gradients(source, rule, {}).layer for source in of_model(model))
    except ExpertFileError as error:
        raise ModelError(f"train.offload: {error}") from None


def _wrong(layer: MoE, used: Counter[int]) -> str:
    """What was expected of a layer; empty where it is as it should be."""
    if layer.experts is not None:
        return "stacked experts, got modules (expert=…)"
    for key, weight in (("w1", layer.w1), ("w2", layer.w2)):
        if weight.dtype not in DTYPES:
            return f"experts of float32 or float64, got {weight.dtype}"
        if not weight.requires_grad:
            return f"{key} to be trained, got requires_grad=False"
        if used[id(weight)] > 1:
            return f"{key} of its own, got one that another module has too"
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return f"{key} without hooks, got one on its gradient, which is never in memory whole"
    if hasattr(layer, "parametrizations"):
        return "plain w1 and w2, got parametrizations"
    return ""
