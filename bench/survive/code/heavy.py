"""A model of many weights and many rows, each of which changes at every step that has it."""

from sleeping import Slow
from torch import nn

from heterps import SparseEmbedding


class Bulk(nn.Module):
    """Adds to each sample what a wide layer, which is costly to keep, makes of their mean."""

    def __init__(self, inputs, width):
        super().__init__()
        self.widen = nn.Linear(inputs, width)
        self.wide = nn.Linear(width, width)
        self.narrow = nn.Linear(width, inputs)

    def forward(self, x):
        return x + self.narrow(self.wide(self.widen(x.mean(0, keepdim=True))))


class Model(nn.Module):
    def __init__(self, keys, dim, width, seconds, trace):
        super().__init__()
        inputs = keys * dim
        self.rows = SparseEmbedding("rows", dim, optimizer="adam", learning_rate=0.01)
        tower = nn.Sequential(nn.Flatten(), Bulk(inputs, width), nn.Linear(inputs, 1))
        self.tower = Slow(tower, seconds, trace)

    def forward(self, sparse):
        return self.tower(self.rows(sparse)).squeeze(-1)
