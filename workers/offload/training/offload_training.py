"""Trains a model with its experts, and what their optimizer keeps, out of memory."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock

import torch
from torch.nn import Module
from torch.optim import Optimizer

from workers.moe.layer import MoE
from workers.offload.experts.layout import ExpertFileError, LayerAt, placed
from workers.offload.experts.pack import write
from workers.offload.experts.source import moe_layers, of_model
from workers.offload.experts.trained import TrainedExperts, with_states
from workers.offload.experts.updates import rule_of
from workers.offload.running.bare import strip
from workers.offload.running.offload import check_devices, on_meta
from workers.offload.running.size import bytes_of
from workers.offload.slots.policy import POLICIES
from workers.offload.training.backward import TrainedOutside
from workers.offload.training.training import Course, Training, weights_of
from workers.offload.training.write_back import ChangingCache

# Of smaller ones torch's optimizers round otherwise at the end of a tensor than inside.
DTYPES = (torch.float32, torch.float64)
_WORKING = 3  # times an expert's weights: gradients, and what an optimizer has meanwhile


def offload_training(
    model: Module,
    optimizer: Optimizer,
    memory: int | str,
    *,
    path: str | Path,
    policy: str = "lru",
    readers: int = 8,
    direct: bool = True,
    period: int = 0,
) -> Training:
    """Have a model's experts and their optimizer's states lie in a file and in `memory`, to train.

    Changes both, in place: MoE layers lose the parameters of their experts, and so does the
    optimizer. From then on a backward updates the experts that it has gradients of, by the options
    that the optimizer has meanwhile, and the optimizer updates all else. Weights are those of the
    model and the optimizer as they were, bit for bit, at equal batches, threads and backends.

    Each step is one forward, one backward of each layer, and optimizer.step(); gradients are not
    kept, so that they can be neither clipped nor unscaled, nor added up over batches.

    Args:
        model: on a CPU, with `heterps.MoE` layers of stacked experts.
        optimizer: SGD, Adam or AdamW of torch, not fused, without states of the experts.
        memory: bytes, or as "2GB", for experts with their states and what updates them.
        path: the file of experts. Where there is none it is made of the model's. To go on with one
            that was closed, or saved with its states, the model's experts are on the device meta.
        policy: lru | lfu | lfu-decay | clock: who gives way, written first if it has changed.
        readers: threads that read.
        direct: read and write past the page cache, where the file system allows that.
        period: steps after which all that has changed is written; 0: as they give way.

    Raises:
        ExpertFileError: the file is damaged, was not closed, or has other experts than the model.
        ValueError: an argument out of range, or experts that are modules or not on a CPU.
        OSError: a file can be neither read nor written.
    """
    if policy not in POLICIES:
        raise ValueError(f"offload: policy: expected {', '.join(POLICIES)}, got {policy!r}")
    if readers < 1 or period < 0:
        raise ValueError(f"offload: readers, period: expected from 1, 0 on: {readers}, {period}")
    allowed = bytes_of(memory, "offload: memory")
    layers, file = moe_layers(model), Path(path)
    check_devices(model)
    _check_alone(layers)
    rules, groups, sources = [], [], []
    for (name, layer), source in zip(layers.items(), of_model(model), strict=True):
        number = _group_of(optimizer, name, layer)
        groups.append(number)
        rules.append(rule_of(optimizer, optimizer.param_groups[number], layer.w1.dtype))
        sources.append(with_states(source, rules[-1]))
        if on_meta(layer) != file.exists():
            raise ExpertFileError(
                f"{file}: {name}: expected experts on the device meta and the file, to go on with, "
                "or values and no such file"
            )
    at = placed(source.layer for source in sources)
    slots = slots_in(allowed, at, "offload: memory")
    if not file.exists():
        write(sources, file)
    packed = TrainedExperts(file, direct=direct)
    try:
        packed.require([source.layer for source in sources])
        places = {layer.name: i for i, layer in enumerate(packed.layers)}
        store = ChangingCache(packed, slots, POLICIES[policy](), readers)
    except BaseException:
        packed.finish()
        packed.close()
        raise
    courses = []
    for i, layer_at in enumerate(packed.layers):
        mine = list(layers).index(layer_at.name)
        courses.append(Course(rules[mine], optimizer, groups[mine], _steps_of(store, i), []))
    training = Training(store, courses, period)
    guard = Lock()
    for name, layer in layers.items():
        gone = {id(layer.w1), id(layer.w2)}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in gone]
        layer.outside = TrainedOutside(training, places[name], packed.layers[places[name]], guard)
        strip(layer, name)
    optimizer.register_step_post_hook(lambda *_: training.stepped())
    return training


def _check_alone(layers: Mapping[str, MoE]) -> None:
    """See that nobody else has a part in the experts' gradients."""
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    if joined and distributed.get_world_size() > 1:
        raise ValueError("offload: expected to train in one process, got a group of several")
    stacked = [layer for layer in layers.values() if layer.experts is None]
    weights = {id(one) for layer in stacked for one in (layer.w1, layer.w2)}
    if len(weights) < 2 * len(stacked):
        raise ValueError("offload: expected experts of their own in each layer, got shared ones")


def slots_in(memory: int, layers: Sequence[LayerAt], what: str) -> int:
    """How many experts with their states have room, beside what updates one.

    Raises:
        ValueError: not one; names what says how much memory there is.
    """
    extent, working = _least_in(layers)
    if memory < extent + working:
        raise ValueError(
            f"{what}: expected at least {extent + working} bytes, for an expert with its "
            f"states and what updates it, got {memory}"
        )
    return min((memory - working) // extent, sum(layer.experts for layer in layers))


def least_in(layers: Sequence[LayerAt]) -> int:
    """The bytes with which one expert has room."""
    return sum(_least_in(layers))


def _least_in(layers: Sequence[LayerAt]) -> tuple[int, int]:
    """Bytes of an expert with its states, and of what updates one."""
    extent = max(layer.extent for layer in layers)
    return extent, _WORKING * max(sum(w.size for w in weights_of(layer)) for layer in layers)


def _steps_of(store: ChangingCache, layer: int) -> int:
    """Of a layer that is whole, by its first expert."""
    at = store.packed.layers[layer]
    with closing(store.arrivals(layer, [0])) as arrivals:
        for ready in arrivals:
            return next(int(one.of(ready.memory[ready.places[0]])) for one in at.tensors[-1:])
    raise AssertionError


def _group_of(optimizer: Optimizer, name: str, layer: MoE) -> int:
    """The number of the optimizer's group of a layer's experts.

    Raises:
        ValueError: there is none, or more than one; they are modules, or the optimizer has states.
    """
    if layer.experts is not None:
        raise ValueError(f"offload: {name}: expected stacked experts, to train them, got modules")
    if layer.w1.dtype not in DTYPES:
        raise ValueError(
            f"offload: {name}: expected experts of float32 or float64, to train them, got "
            f"{layer.w1.dtype}"
        )
    if not (layer.w1.requires_grad and layer.w2.requires_grad):
        raise ValueError(f"offload: {name}: expected w1 and w2 to require gradients")
    found = []
    for number, group in enumerate(optimizer.param_groups):
        ids = {id(one) for one in group["params"]}
        found += [number] * ((id(layer.w1) in ids) + (id(layer.w2) in ids))
    if len(found) != 2 or found[0] != found[1]:
        raise ValueError(f"offload: optimizer: expected w1 and w2 of {name} in one of its groups")
    if layer.w1 in optimizer.state or layer.w2 in optimizer.state:
        raise ValueError(
            f"offload: optimizer: expected one that has made no step of {name}, got its states"
        )
    return found[0]
