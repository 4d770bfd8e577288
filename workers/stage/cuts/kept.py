"""The state that a worker has kept, as bytes for another of its stage: in memory once there."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import ScaleState, Validated
from workers.model.saved.dense_file import chunks_of
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.state import StageState

_HEAD = "head"


def to_chunks(kept: Beginning, size: int = 1 << 20) -> Iterator[bytes]:
    """All that a worker of the same stage and job begins with, in pieces of `size` bytes at most.

    What is kept must not change before the last of them is taken.
    """
    assert kept.state is not None
    head = {
        "step": kept.step,
        "samples": kept.samples,
        "applied": kept.applied,
        "scales": None if kept.scales is None else asdict(kept.scales),
        "train_seconds": kept.train_seconds,
        "validated": [asdict(one) for one in kept.validated],
        "to_validate": kept.to_validate,
        "committed": kept.committed,
        "stopped": kept.stopped,
        "contents": kept.contents,
    }
    tensors = {
        _HEAD: torch.tensor(list(json.dumps(head).encode()), dtype=torch.uint8),
        **kept.curve.tensors(),
    }
    for kinds in kept.state.by_layer(()).values():
        for kind, some in kinds.items():
            tensors |= {f"{kind}/{name}": tensor for name, tensor in some.items()}
    return chunks_of(tensors, size)


def of_chunks(chunks: Iterable[bytes], folder: Path | None = None) -> Beginning:
    """What `to_chunks` made.

    Args:
        folder: for a file without a name, in which it lies; None: it is in memory.

    Raises:
        OSError: there is no room.
    """
    if folder is None:
        file = os.memfd_create("state")  # which the tensors are mapped from
    else:
        with tempfile.TemporaryFile(dir=folder) as named:
            file = os.dup(named.fileno())
    try:
        with os.fdopen(os.dup(file), "wb") as stream:
            stream.writelines(chunks)
        tensors = load_file(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    head = json.loads(bytes(tensors.pop(_HEAD).tolist()))
    curve = LossCurve.take(tensors)
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, own = name.partition("/")
        kinds.setdefault(kind, {})[own] = tensor
    scales = head["scales"]
    if scales is not None:
        scales = ScaleState(scales["value"], scales["good"], tuple(scales["steps"]))
    return Beginning(
        head["step"],
        head["samples"],
        head["applied"],
        scales,
        curve,
        head["train_seconds"],
        StageState.of_layers([kinds]),
        validated=tuple(Validated(one["step"], one["metrics"]) for one in head["validated"]),
        to_validate=head["to_validate"],
        committed=head["committed"],
        stopped=head["stopped"],
        contents=head["contents"],
    )
