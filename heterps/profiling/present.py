"""Which of the resource types on offer are on this machine."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from protos.decision_pb2 import ResourceType


def is_cpu(kind: ResourceType) -> bool:
    """Whether a unit is a CPU core: by `device`, else by the name."""
    return (kind.device or kind.name).lower().startswith("cpu")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def present_types(
    offered: Sequence[ResourceType], emulated: Collection[str] = (), units: int | None = None
) -> dict[str, int]:
    """Units of the offered types that are here, the CPU's first.

    Args:
        emulated: types that are not to be looked for.
        units: cores to count instead of all.
    """
    wanted = [kind for kind in offered if kind.name not in emulated]
    processors = [kind for kind in wanted if is_cpu(kind)]
    # One pool of cores: of several CPU types only the first that fits is here.
    there = units or cores()
    fitting = [(kind.name, there // (kind.threads or 1)) for kind in processors]
    found = dict([one for one in fitting if one[1]][:1])
    accelerators = [kind for kind in wanted if not is_cpu(kind)]
    if accelerators and any(Path("/dev").glob("nvidia[0-9]*")):
        found |= _gpus(accelerators)
    return found


def _gpus(kinds: Sequence[ResourceType]) -> dict[str, int]:
    """The GPUs here, under the type that they carry the name of; under the only one otherwise."""
    import torch

    if not torch.cuda.is_available():
        return {}
    words = torch.cuda.get_device_name(0).lower().replace("-", " ").split()
    named = [kind.name for kind in kinds if kind.name.lower() in words]
    named = named or [kind.name for kind in kinds[:1] if len(kinds) == 1]
    return {named[0]: torch.cuda.device_count()} if named else {}
