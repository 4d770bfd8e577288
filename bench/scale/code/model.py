"""A model that sleeps: rows from the servers, pooled, then one slow layer or two."""

import os
import time

import torch
from torch import nn

from heterps import SparseEmbedding


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer, ctx.seconds, ctx.begun = layer, layer.seconds * len(x), time.monotonic()
        ctx.width = x.shape[1]
        time.sleep(ctx.seconds / 3)
        return x.mean(1, keepdim=True) * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.note(ctx.begun, len(gradient))
        time.sleep(ctx.seconds * 2 / 3)
        back = gradient.expand(-1, ctx.width) / ctx.width
        return back.contiguous(), gradient.sum().reshape(1), None


class Slow(nn.Module):
    def __init__(self, seconds, trace):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.trace, self.file = seconds, trace, None

    def note(self, begun, samples):
        if self.file is None:
            path = os.path.join(self.trace, str(os.getpid()))
            self.file = open(path, "a", buffering=1)  # noqa: SIM115
        self.file.write(f"{begun!r} {samples}\n")

    def forward(self, x):
        if self.training and torch.is_grad_enabled() and x.requires_grad:
            return Sleep.apply(x, self.weight, self)
        return x.mean(1, keepdim=True) * self.weight


class Pooled(nn.Module):
    def __init__(self, keys):
        super().__init__()
        self.rows = SparseEmbedding("rows", 16, optimizer="adagrad", learning_rate=0.01)

    def forward(self, keys):
        return self.rows(keys).mean(1)


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, dense):
        return dense.reshape(-1, 1) * self.weight


class Net(nn.Module):
    def __init__(self, keys, front_s, back_s, front, back):
        super().__init__()
        self.input = Pooled(keys) if keys else Straight()
        self.front = Slow(front_s, front)
        if back_s:
            self.back = Slow(back_s, back)
        self.slow = ["front", "back"] if back_s else ["front"]

    def forward(self, x):
        x = self.input(x)
        for name in self.slow:
            x = getattr(self, name)(x)
        return x.squeeze(1)
