"""What is computed between layers, and has a backward of its own."""

import torch


class Reverse(torch.autograd.Function):
    """Turns gradients round, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx, x, rate):
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.rate * gradient, None
