"""A job's model of which some layers sleep: copied beside the model's own file."""

import importlib.util
import math
import os
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn

_LATE_S = 0.0001  # that a sleep ends after its time
_kept = {}  # zeros, by dtype


class Sleep(torch.autograd.Function):
    """Zeros after a while; their gradients, after another while, are zeros, too.

    What it takes to make them, and to wake up, is part of the while.
    """

    @staticmethod
    def forward(ctx, layer, samples, weight, *inputs):
        until = time.monotonic() + layer.forward_s * samples
        ctx.seconds = layer.backward_s * samples
        ctx.save_for_backward(weight)
        ctx.inputs = [(x.shape, x.dtype) if x.is_floating_point() else None for x in inputs]
        zeros = _zeros((round(samples * layer.times), *layer.shape), torch.float32)
        _sleep(until)
        return zeros

    @staticmethod
    def backward(ctx, gradient):
        until = time.monotonic() + ctx.seconds
        zeros = [_zeros(*like) if like else None for like in ctx.inputs]
        of_weight = torch.zeros_like(ctx.saved_tensors[0])
        _sleep(until)
        return None, None, of_weight, *zeros


class Sleeping(nn.Module):
    """Stands for a layer; `samples_of` says how many samples a first input stands for."""

    def __init__(self, forward, backward, shape, times, samples_of):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.forward_s, self.backward_s = forward, backward
        self.shape, self.times, self.samples_of = [int(n) for n in shape], times, samples_of

    def forward(self, *inputs):
        samples = inputs[0].shape[0] / self.samples_of
        return Sleep.apply(self, samples, self.weight, *inputs)


class Traced(nn.Module):
    """The last layer, which writes down when each micro-batch that is learned from begins."""

    def __init__(self, layer, least, rows_of, trace):
        super().__init__()
        self.layer, self.least, self.rows_of, self.trace = layer, least, rows_of, trace
        self.file = None  # opened where the model was copied to

    def forward(self, *inputs):
        begun, rows = time.monotonic(), round(inputs[0].shape[0] / self.rows_of)
        output = self.layer(*inputs)

        def note(_):
            if self.file is None:
                path = os.path.join(self.trace, str(os.getpid()))
                self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(self.file, f"{begun!r} {rows}\n".encode())

        if self.training and output.requires_grad and rows >= self.least:  # fewer are a trial
            output.register_hook(note)
        return output


class Pin:
    """Puts the process whose layers compute onto a core, once it learns."""

    def __init__(self, stage, core):
        self.stage, self.core = stage, core

    def __call__(self, module, inputs, output):
        learns = module.training and isinstance(output, torch.Tensor) and output.requires_grad
        if learns and _trains(self.stage):
            output.register_hook(self._pin)

    def _pin(self, _):
        if os.sched_getaffinity(0) != {self.core}:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {self.core})


def build(
    entry, arguments, sleeping, last, rows_of, trace, least, computing=(), stage=0, core=None
):
    """Build the model of `entry` and put layers that sleep into the place of some.

    Who computes `computing`, of `stage`, goes to `core` by itself, where one is given. A
    micro-batch has at least `least` samples.
    """
    file, _, name = entry.rpartition(":")
    path = Path(__file__).with_name(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    model = getattr(module, name)(**{key: _whole(value) for key, value in arguments.items()})
    for layer, own in sleeping.items():
        _replace(model, layer, Sleeping(**own))
    if core is not None:
        for layer in computing:
            model.get_submodule(layer).register_forward_hook(Pin(int(stage), int(core)))
    _replace(model, last, Traced(model.get_submodule(last), least, rows_of, trace))
    return model


def _trains(stage):
    """Whether this is a worker of a stage: others try all layers before there is training."""
    found = re.search(r"/stage-(\d+)-worker-", Path("/proc/self/cmdline").read_text())
    return found is not None and int(found[1]) == stage


def _zeros(shape, dtype):
    """Of one memory for all: to get pages from the system may take longer than a layer sleeps."""
    size = math.prod(shape)
    if dtype not in _kept or _kept[dtype].numel() < size:
        _kept[dtype] = torch.zeros(size, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(_kept[dtype].untyped_storage()).resize_(shape)


def _sleep(until):
    left = until - time.monotonic() - _LATE_S
    if left > 0:
        time.sleep(left)


def _whole(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _replace(model, name, module):
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
