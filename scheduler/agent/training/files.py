"""Policy files: the network's weights as safetensors, with what made them as metadata."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from chassis.files import aside
from scheduler.agent.training.network import DISTANCES, Network, Size


def save(network: Network, path: Path, note: dict[str, str]) -> None:
    """Write a network and `note` about its training; the file appears whole or not at all."""
    config = {**asdict(network.size), "distances": DISTANCES}
    weights = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    with aside(path) as unfinished:
        save_file(weights, unfinished, {**note, "config": json.dumps(config)})


def load(path: Path) -> Network:
    """Read a network back for training."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    size = Size(**{name: config[name] for name in ("width", "heads", "blocks")})
    network = Network(size)
    network.load_state_dict(load_file(path))
    network.to(torch.float32)
    return network
