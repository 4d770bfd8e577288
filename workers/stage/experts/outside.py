"""Where the experts of a job lie out of memory, and how a stage's layers come to them.

What every worker imports: what has them is imported where a job asks for it.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chassis import scratch
from protos.job_pb2 import JobSpec
from workers.device.mapped import mapped
from workers.moe.layer import MoE
from workers.moe.made import experts_made_by

if TYPE_CHECKING:
    from workers.offload.training.gathered import GatheredExperts

_IN_MEMORY = ("tmpfs", "ramfs")  # file systems


def folder_of(job: JobSpec) -> Path | None:
    """Where a job's experts lie on this host; None: in memory.

    Raises:
        OSError: it cannot be made.
        ValueError: it is no disk.
    """
    spec = job.train.offload
    if not spec.memory:
        return None
    folder = Path(spec.path) if spec.path else scratch.own() or _temporary()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"train.offload.path: {error.strerror}; expected a folder that can be made"
        raise OSError(error.errno, told, str(folder)) from None
    if (kind := _kind_of(folder)) in _IN_MEMORY:
        raise ValueError(
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


def outside_of(module: nn.Module) -> "GatheredExperts | None":
    """Those of a stage that are out of memory; None: all are in it."""
    for layer in module.modules():
        if isinstance(layer, MoE) and layer.outside is not None:
            trained: Any = layer.outside
            experts: GatheredExperts = trained.training
            return experts
    return None


def _temporary() -> Path:
    """A folder of this process, where no job shares one."""
    folder = scratch.temporary("offload")
    atexit.register(scratch.discard, folder)
    return folder


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
