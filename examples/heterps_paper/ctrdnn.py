"""CTRDNN: one embedding table and a tower of three, operator by operator (16 layers)."""

import torch
from torch import Tensor, nn

from heterps import SparseEmbedding


class Flatten(nn.Module):
    """Vectors [B, slots, dim] side by side, [B, slots * dim]."""

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class Concat(nn.Module):
    """Embedded slots [B, n] and numbers [B, m], [B, n + m]."""

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        return torch.cat([vectors, dense], 1)


class Bias(nn.Module):
    """Adds a vector [width] to each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class LogOdds(nn.Module):
    """Logit [B] of class probabilities [B, 2]: what the job's cross entropy takes."""

    def forward(self, chances: Tensor) -> Tensor:
        logs = torch.log(chances.clamp_min(1e-7))
        return logs[:, 1] - logs[:, 0]


class CTRDNN(nn.Module):
    """Clicked or not, from `slots` keys and `dense` numbers.

    Each fully connected layer is three layers here, its product, its bias and its activation, as
    the operators of the published program are.
    """

    def __init__(self, slots: int, dense: int, dim: int, width: int) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "ctrdnn", dim, optimizer="adam", learning_rate=1e-3, scale=0.1
        )
        self.reshape = Flatten()
        self.concat = Concat()
        self.fc1_product = product(slots * dim + dense, width)
        self.fc1_bias = Bias(width)
        self.fc1_relu = nn.ReLU()
        self.fc2_product = product(width, width)
        self.fc2_bias = Bias(width)
        self.fc2_relu = nn.ReLU()
        self.fc3_product = product(width, width)
        self.fc3_bias = Bias(width)
        self.fc3_relu = nn.ReLU()
        self.predict_product = product(width, 2)
        self.predict_bias = Bias(2)
        self.predict_softmax = nn.Softmax(dim=1)
        self.log_odds = LogOdds()

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and numbers [B, dense]."""
        x = self.concat(self.reshape(self.embedding(sparse)), dense)
        x = self.fc1_relu(self.fc1_bias(self.fc1_product(x)))
        x = self.fc2_relu(self.fc2_bias(self.fc2_product(x)))
        x = self.fc3_relu(self.fc3_bias(self.fc3_product(x)))
        chances = self.predict_softmax(self.predict_bias(self.predict_product(x)))
        logits: Tensor = self.log_odds(chances)
        return logits


def product(inputs: int, outputs: int) -> nn.Linear:
    """A matrix product, normal of deviation 1 / sqrt(inputs) as published."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def build(slots: int, dense: int, dim: int = 10, width: int = 400) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return CTRDNN(slots, dense, dim, width)
