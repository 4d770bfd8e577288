"""2EMB: a large table of every slot, a small one of the first few, two towers (10 layers)."""

import torch
from torch import Tensor, nn

from heterps import SparseEmbedding

TOWER = (400, 400, 50)
SMALL_ROWS, SMALL_SLOTS, SMALL_WIDTH = 100, 5, 128


class Concat(nn.Module):
    """Vectors [B, slots, dim] or [B, n] and [B, m], side by side."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first.flatten(1), second], 1)


class SmallEmbedding(nn.Module):
    """A table that fits a unit's memory: rows of keys [B, n] modulo its size, [B, n * dim]."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, dim)

    def forward(self, keys: Tensor) -> Tensor:
        x: Tensor = self.rows(keys % self.rows.num_embeddings).flatten(1)
        return x


class Predict(nn.Module):
    """The last layer with its softmax over two classes, as the logit [B] of the second."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, 2)

    def forward(self, x: Tensor) -> Tensor:
        logs = torch.log_softmax(self.fc(x), 1)
        return logs[:, 1] - logs[:, 0]


class TwoEmbeddings(nn.Module):
    """Clicked or not, from `slots` keys and `dense` numbers."""

    def __init__(self, slots: int, dense: int, dim: int) -> None:
        super().__init__()
        first, second, out = TOWER
        self.embedding = SparseEmbedding(
            "large", dim, optimizer="adam", learning_rate=1e-3, scale=0.1
        )
        self.concat = Concat()
        self.fc1 = fully_connected(slots * dim + dense, first)
        self.fc2 = fully_connected(first, second)
        self.fc3 = fully_connected(second, out)
        self.small_embedding = SmallEmbedding(SMALL_ROWS, dim)
        self.small_fc = fully_connected(SMALL_SLOTS * dim, SMALL_WIDTH)
        self.join = Concat()
        self.fc4 = nn.Linear(out + SMALL_WIDTH, 2)
        self.predict = Predict(2)

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and numbers [B, dense]."""
        x = self.fc3(self.fc2(self.fc1(self.concat(self.embedding(sparse), dense))))
        small = self.small_fc(self.small_embedding(sparse[:, :SMALL_SLOTS]))
        logits: Tensor = self.predict(self.fc4(self.join(x, small)))
        return logits


def fully_connected(inputs: int, outputs: int) -> nn.Sequential:
    """A layer with its activation, normal of deviation 1 / sqrt(inputs) as published."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=inputs**-0.5)
    return nn.Sequential(linear, nn.ReLU())


def build(slots: int, dense: int, dim: int = 10) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return TwoEmbeddings(slots, dense, dim)
