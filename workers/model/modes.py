"""Tracing a model's forward in training or in evaluation, without leaving a mark on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Have the model in a mode, and afterwards all as it was: modes, attributes and buffers.

    Symbolic tracing runs forwards in Python, which may count or keep something.
    """
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
