"""The state that a worker has kept, as bytes for another of its stage."""

import json
from dataclasses import asdict

import torch
from safetensors.torch import load, save

from workers.model.cut import ScaleState, Validated
from workers.model.loss_curve import LossCurve
from workers.stage.beginning import Beginning
from workers.stage.state import StageState

_HEAD = "head"


def to_bytes(kept: Beginning) -> bytes:
    """All that a worker of the same stage and job begins with."""
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
    }
    tensors = {
        _HEAD: torch.tensor(list(json.dumps(head).encode()), dtype=torch.uint8),
        **kept.curve.tensors(),
    }
    for kinds in kept.state.by_layer(()).values():
        for kind, some in kinds.items():
            tensors |= {f"{kind}/{name}": tensor for name, tensor in some.items()}
    return save(tensors)


def of_bytes(data: bytes) -> Beginning:
    """What `to_bytes` made."""
    tensors = load(data)
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
    )
