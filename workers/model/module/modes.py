"""Tracing a model's forward in training or in evaluation, without leaving a mark on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


def in_other_mode(model: nn.Module, training: bool) -> Sequence[nn.Module]:
    """The modules that a model's own `train`, or one of its containers', leaves in the other."""
    with in_mode(model, training):
        return [module for module in model.modules() if module.training is not training]


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Have the model in a mode, and afterwards all as it was: modes, attributes and buffers.

    Symbolic tracing runs forwards in Python, which may count or keep something.
    """
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    with keeping_buffers(model):
        model.train(training)
        try:
            yield
        finally:
            for module, before in zip(modules, attributes, strict=True):
                module.__dict__.clear()
                module.__dict__.update(before)


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards a model has the buffers that it had, with the values that they had."""
    modules = [m for m in model.modules() if isinstance(m._buffers, dict)]  # of a script not
    named = [dict(module._buffers) for module in modules]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, before in zip(modules, named, strict=True):
            module._buffers.clear()
            module._buffers.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
