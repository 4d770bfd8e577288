"""A model of two halves, one of which sleeps in each stage; a row of each sample counts it."""

import torch
from sleeping import Slow
from torch import nn

from heterps import SparseEmbedding


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return torch.zeros_like(rows)

    @staticmethod
    def backward(ctx, gradient):
        return -torch.ones_like(gradient)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = SparseEmbedding(
            "seen", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros"
        )

    def forward(self, keys):
        return Once.apply(self.seen(keys))


class Model(nn.Module):
    def __init__(self, front_s, back_s, width, front_trace, trace):
        super().__init__()
        self.counter = Counter()
        self.embedding = SparseEmbedding("rows", 4, optimizer="adam", learning_rate=0.05)
        tower = nn.Sequential(nn.Flatten(), nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU())
        self.tower = Slow(tower, front_s, front_trace)
        self.head = Slow(nn.Linear(width, 1), back_s, trace)

    def forward(self, sparse):
        counted = self.counter(sparse[:, 2])
        return self.head(self.tower(self.embedding(sparse[:, :2])) + counted).squeeze(-1)
