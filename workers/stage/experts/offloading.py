"""Takes the experts of a job's stage out of memory, and gives its layers what has them."""

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from protos.job_pb2 import DenseOptimizer, JobSpec
from workers.errors import UnfitPlanError
from workers.learning.optimizers import is_constant, make_optimizer, rate_factor
from workers.links.all_reduce import StageGroup
from workers.moe.layer import MoE
from workers.offload.experts.layout import placed
from workers.offload.experts.pack import write
from workers.offload.experts.source import of_model
from workers.offload.experts.trained import TrainedExperts
from workers.offload.experts.updates import rule_for
from workers.offload.running.bare import strip
from workers.offload.slots.policy import POLICIES
from workers.offload.training.backward import TrainedOutside
from workers.offload.training.gathered import (
    WEIGHTS,
    Course,
    GatheredExperts,
    Options,
    with_gradients,
)
from workers.offload.training.offload_training import slots_in
from workers.offload.training.suited import MEMORY, rooms_of
from workers.offload.training.write_back import ChangingCache

_READERS = 8
_KINDS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
_log = logging.getLogger("heterps.stage")


def take_out(
    job: JobSpec,
    module: nn.Module,
    group: StageGroup,
    device: torch.device,
    folder: Path,
    rooms: Mapping[str, int],
    steps: int,
    step: int,
    applied: int,
    kept: Mapping[str, Mapping[str, Tensor]],
) -> GatheredExperts | None:
    """Take the experts of a stage out of memory; all its workers call it. None: it has none.

    Args:
        module: whose weights are those that the training begins with.
        folder: for the file.
        rooms: bytes of memory for each layer's experts, as of `rooms_of`.
        steps: of the training.
        step: that it begins at.
        applied: steps before it that were.
        kept: what the optimizer keeps, by parameters.

    Raises:
        UnfitPlanError: they are on a GPU.
        ValueError: there is not memory for one of them.
        OSError: there is no room, or the disk fails.
    """
    layers = {name: one for name, one in module.named_modules() if isinstance(one, MoE)}
    if not layers:
        return None
    if device.type != "cpu":
        raise UnfitPlanError(
            f"train.offload: {', '.join(layers)}: planned for a GPU; expected layers with experts "
            "out of memory on a type of CPU cores: pin them there with schedule.pin"
        )
    spec, optimizer = job.train.offload, job.train.optimizer
    sources, courses = [], []
    for (name, layer), source in zip(layers.items(), of_model(module), strict=True):
        for pair in zip(layer.w1.detach(), layer.w2.detach(), strict=True):
            group.share_parameters(pair)
        of_layer = {key: kept[f"{name}.{key}"] for key in WEIGHTS if f"{name}.{key}" in kept}
        options = _options(optimizer, steps, [(f"{name}.{key}",) for key in WEIGHTS])
        rule = rule_for(_KINDS[optimizer.name], options(0)[0], layer.w1.dtype)
        made = of_layer.get("w1", {})
        before = int(made["step"]) if "step" in made else int(bool(made))
        sources.append(with_gradients(source, rule, of_layer))
        courses.append((rule, options, before))
    at = placed(source.layer for source in sources)
    slots = slots_in(sum(rooms[name] for name in layers), at, MEMORY)
    path = folder / f"experts-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        write(sources, path)
        packed = TrainedExperts(path)
    finally:
        path.unlink(missing_ok=True)  # it lasts as long as it is open, however this process ends
    store = ChangingCache(packed, slots, POLICIES[spec.policy or "lru"](), spec.readers or _READERS)
    outside = GatheredExperts(
        store,
        [
            Course(one, rule, options, before)
            for one, (rule, options, before) in zip(packed.layers, courses, strict=True)
        ],
        folder,
        rooms,
        step,
        applied,
    )
    for number, (name, layer) in enumerate(layers.items()):
        layer.outside = TrainedOutside(outside, number, packed.layers[number], outside.lock)
        strip(layer, name)
    _log.info(
        "%d experts of %s lie in %s, %d of them in memory",
        *(sum(layer.num_experts for layer in layers.values()), ", ".join(layers)),
        *(folder, outside.slots),
    )
    return outside


def take_all_out(job: JobSpec, model: nn.Module, folder: Path) -> None:
    """Take all experts of a model out of memory, at a worker that is alone: to be measured."""
    cpu = torch.device("cpu")
    take_out(job, model, StageGroup(cpu), cpu, folder, rooms_of(job, model), 1, 0, 0, {})


def _options(
    spec: DenseOptimizer, steps: int, names: Sequence[tuple[str]]
) -> Callable[[int], tuple[Options, ...]]:
    """What the optimizer's options for some parameters are, after so many applied steps."""
    stand_ins = [nn.Parameter(torch.zeros(1)) for _ in names]
    optimizer = make_optimizer(spec, stand_ins, names)
    assert optimizer is not None
    found: list[Options] = []
    for one in stand_ins:
        group = next(g for g in optimizer.param_groups if any(p is one for p in g["params"]))
        found.append({k: v for k, v in group.items() if k not in ("params", "numbers")})
    if is_constant(spec):
        return lambda applied: tuple(found)

    def at(applied: int) -> tuple[Options, ...]:
        factor = rate_factor(spec, applied, steps)
        return tuple({**one, "lr": one["lr"] * factor} for one in found)

    return at
