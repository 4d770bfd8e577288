"""The state that a worker has kept, as bytes for another of its stage."""

import json
from dataclasses import asdict

import torch
from safetensors.torch import load, save

from workers.model.cut import ScaleState
from workers.stage.beginning import Beginning
from workers.stage.state import StageState

_LOSSES = "losses"


def to_bytes(kept: Beginning) -> bytes:
    """All that a worker of the same stage and job begins with."""
    assert kept.state is not None
    head = {
        "step": kept.step,
        "samples": kept.samples,
        "applied": kept.applied,
        "scales": None if kept.scales is None else asdict(kept.scales),
        "train_seconds": kept.train_seconds,
        "ages": len(kept.state.earlier),
    }
    tensors = {_LOSSES: torch.tensor(kept.losses, dtype=torch.float64)}
    for kinds in kept.state.by_layer(()).values():
        for kind, some in kinds.items():
            tensors |= {f"{kind}/{name}": tensor for name, tensor in some.items()}
    return save(tensors, {"kept": json.dumps(head)})


def of_bytes(data: bytes) -> Beginning:
    """What `to_bytes` made."""
    length = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kept"])
    tensors = load(data)
    losses = tensors.pop(_LOSSES).tolist()
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
        losses,
        head["train_seconds"],
        StageState.of_layers([kinds]),
    )
