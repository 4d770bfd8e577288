"""Batches and dense layers as PyTorch has them."""

from pathlib import Path

import torch
from torch import Tensor, nn

from bench.ctr.peers.turns import arrays
from bench.ctr.shape import first_layers

Batch = tuple[Tensor, Tensor, Tensor]  # rows [B, slots], numbers [B, dense], labels [B]


def batches(path: Path, part: int = 0, parts: int = 1) -> list[Batch]:
    """The samples by step; of each a part."""
    found = []
    for one in arrays(path, part, parts):
        rows, dense, labels = map(torch.from_numpy, one)
        found.append((rows, dense, labels))
    return found


def tower() -> nn.Sequential:
    """The dense layers."""
    layers: list[nn.Module] = []
    for weight, bias in first_layers():
        outputs, inputs = weight.shape
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
