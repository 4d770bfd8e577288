"""A job's experts out of memory: from the model that is built to the stage that trains them."""

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from chassis import scratch
from protos.job_pb2 import DenseOptimizer, JobSpec
from workers.device.mapped import mapped
from workers.errors import UnfitPlanError
from workers.learning.optimizers import is_constant, make_optimizer, rate_factor
from workers.links.all_reduce import StageGroup
from workers.moe.layer import MoE
from workers.moe.made import experts_made_by
from workers.offload.backward import TrainedOutside
from workers.offload.gathered import WEIGHTS, Course, GatheredExperts, Options, with_gradients
from workers.offload.layout import placed
from workers.offload.offload import strip
from workers.offload.offload_training import slots_in
from workers.offload.pack import write
from workers.offload.policy import POLICIES
from workers.offload.size import bytes_of
from workers.offload.source import of_model
from workers.offload.suited import MEMORY
from workers.offload.trained import TrainedExperts
from workers.offload.updates import rule_for
from workers.offload.write_back import ChangingCache

_READERS = 8
_IN_MEMORY = ("tmpfs", "ramfs")  # file systems
_KINDS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
_log = logging.getLogger("heterps.stage")


def folder_of(job: JobSpec) -> Path | None:
    """Where a job's experts lie on this host; None: in memory.

    Raises:
        OSError: it cannot be made, or is no disk.
    """
    spec = job.train.offload
    if not spec.memory:
        return None
    folder = Path(spec.path) if spec.path else scratch.own() or scratch.temporary("offload")
    folder.mkdir(parents=True, exist_ok=True)
    if (kind := _kind_of(folder)) in _IN_MEMORY:
        raise OSError(
            f"train.offload.path: {folder} is {kind}, which is memory; expected a folder on a disk"
        )
    return folder


@contextmanager
def built_in(folder: Path | None) -> Iterator[None]:
    """Meanwhile a model that is built has its experts in files of a folder; None: in memory."""
    if folder is None:
        yield
        return
    with experts_made_by(lambda *shape: mapped(folder, shape, torch.get_default_dtype())):
        yield


def outside_of(module: nn.Module) -> GatheredExperts | None:
    """Those of a stage that are out of memory; None: all are in it."""
    for layer in module.modules():
        if isinstance(layer, MoE) and isinstance(layer.outside, TrainedOutside):
            experts = layer.outside.training
            assert isinstance(experts, GatheredExperts)
            return experts
    return None


def take_out(
    job: JobSpec,
    module: nn.Module,
    group: StageGroup,
    device: torch.device,
    folder: Path,
    steps: int,
    step: int,
    applied: int,
    kept: Mapping[str, Mapping[str, Tensor]],
) -> GatheredExperts | None:
    """Take the experts of a stage out of memory; all its workers call it. None: it has none.

    Args:
        module: whose weights are those that the training begins with.
        folder: for the file.
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
    slots = slots_in(bytes_of(spec.memory, MEMORY), at, MEMORY)
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


def _kind_of(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where that is not known."""
    best, kind = -1, ""
    whole = folder.resolve()
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")
        if whole.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), found
    return kind
