"""Writes a file of experts, one expert in memory at a time."""

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from chassis.files import aside, open_regular, sync_folder
from ps.checkpoint.places import open_store
from workers.model.saved.facts import DENSE, MODEL, check_dense, read_facts
from workers.offload.experts.checkpoints import of_checkpoint
from workers.offload.experts.layout import LayerAt, pack_header, placed, view_of
from workers.offload.experts.source import Source, of_model

_DIRTY = 64 << 20  # bytes written before they are sent to the disk and given back
_NO_ANSWER = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def pack_experts(
    source: nn.Module | str | Path,
    path: str | Path,
    *,
    names: str = "heterps",
    layers: str | None = None,
) -> tuple[LayerAt, ...]:
    """Write the experts of a model, a saved job or a checkpoint into one file.

    Besides what the source itself takes, there is never more than two experts in memory. The file
    appears whole, or not at all.

    Args:
        source: a model with `heterps.MoE` layers; the folder of a saved job; or a safetensors file,
            or folder of such.
        path: the file; one that is there is replaced.
        names: of the tensors in a checkpoint: heterps | mixtral | olmoe | qwen.
        layers: what a checkpoint's layers are called in the model that will read them, with {} for
            their number, such as "blocks.{}.moe"; as in the checkpoint unless given.

    Returns:
        What is in the file.

    Raises:
        ExpertFileError: the source has no experts, or is damaged.
        ModelError: the saved job is damaged.
        OSError: the file cannot be written, for want of room for one.
    """
    if isinstance(source, nn.Module):
        return write(of_model(source), Path(path))
    folder = Path(source)
    if (folder / MODEL).is_file():
        with open_regular(folder / DENSE) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        check_dense(read_facts(open_store(folder)), digest, str(folder))
        folder = folder / DENSE
    return write(of_checkpoint(folder, names, layers), Path(path))


def write(sources: Sequence[Source], path: Path) -> tuple[LayerAt, ...]:
    """Write layers one after the other; arguments and errors are those of `pack_experts`."""
    layers = list(placed(source.layer for source in sources))
    with aside(path) as unfinished, unfinished.open("xb") as stream:
        file = stream.fileno()
        _require_room(file, layers[-1].end, path)
        written = 0
        for i, (layer, source) in enumerate(zip(layers, sources, strict=True)):
            extent = torch.empty(layer.extent, dtype=torch.uint8)
            view, checksums = view_of(extent), []
            for expert in range(layer.experts):
                checksums.append(layer.fill(extent, source.expert(expert)))
                _write(file, view, layer.at(expert))
                written += layer.extent
                if written >= _DIRTY:
                    _give_back(file)
                    written = 0
            layers[i] = replace(layer, checksums=tuple(checksums))
        _write(file, memoryview(pack_header(layers)), 0)
        os.fsync(file)
        _give_back(file)
    sync_folder(path.absolute().parent)
    return tuple(layers)


def _require_room(file: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in _NO_ANSWER:
            told = f"{error.strerror}: experts of {size:,} bytes are to be written there"
            raise OSError(error.errno, told, str(path)) from None
        os.ftruncate(file, size)


def _write(file: int, view: memoryview, at: int) -> None:
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def _give_back(file: int) -> None:
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
