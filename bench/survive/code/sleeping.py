"""Layers that sleep as long as they are told to take, and tell when they did."""

import os
import time

import torch
from torch import nn


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        time.sleep(layer.seconds * len(x) / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.note(len(gradient))
        time.sleep(ctx.layer.seconds * len(gradient) * 2 / 3)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, layer, seconds, trace=""):
        super().__init__()
        self.layer, self.seconds, self.trace = layer, seconds, trace

    def note(self, samples):
        if self.trace:
            with open(os.path.join(self.trace, str(os.getpid())), "a") as file:
                file.write(f"{time.time()!r} {samples}\n")

    def forward(self, x):
        x = self.layer(x)
        return Sleep.apply(x, self) if self.training and x.requires_grad else x
