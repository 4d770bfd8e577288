"""MATCHNET: a user tower and an item tower matched by cosine, against self-made negatives (16)."""

import torch
from torch import Tensor, nn

from heterps import SparseEmbedding

TOWER = (400, 400, 50)
NEGATIVES = 20
MARGIN = 0.8
SHARPNESS = 4.0  # a cosine is within -1 and 1, a logit is not


class SlotEmbedding(SparseEmbedding):
    """The rows of slots `first` to `last`, exclusive, side by side: [B, n * dim]."""

    def __init__(self, table: str, dim: int, first: int, last: int) -> None:
        super().__init__(table, dim, optimizer="adam", learning_rate=1e-3, scale=0.1)
        self.first, self.last = first, last

    def forward(self, keys: Tensor) -> Tensor:
        return super().forward(keys)[:, self.first : self.last].flatten(1)


class ItemInput(nn.Module):
    """The item's first layer, which also takes the numbers [B, dense]."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.fc = fully_connected(inputs, width)

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x: Tensor = self.fc(torch.cat([vectors, dense], 1))
        return x


class LeastProbable(nn.Module):
    """Indices [B, k] of the k smallest of [B, n]."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, chances: Tensor) -> Tensor:
        return torch.topk(chances, self.k, dim=1, largest=False).indices


class NegativeEmbedding(nn.Module):
    """Rows of indices [B, k] side by side, [B, k * dim]; there are no more rows than indices."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, dim)

    def forward(self, indices: Tensor) -> Tensor:
        x: Tensor = self.rows(indices).flatten(1)
        return x


class Hinge(nn.Module):
    """Pairwise hinge loss, kept in `aux_loss`; returns the logits [B] of the positive score."""

    aux_loss: Tensor | None = None

    def forward(self, positive: Tensor, negative: Tensor) -> Tensor:
        self.aux_loss = torch.relu(MARGIN - positive + negative).mean()
        return SHARPNESS * positive


class MatchNet(nn.Module):
    """How well an item suits a user, from `slots` keys, `user_slots` of them the user's."""

    def __init__(self, slots: int, dense: int, dim: int, user_slots: int) -> None:
        super().__init__()
        first, second, out = TOWER
        self.user_embedding = SlotEmbedding("user", dim, 0, user_slots)
        self.user_fc1 = fully_connected(user_slots * dim, first)
        self.user_fc2 = fully_connected(first, second)
        self.user_fc3 = fully_connected(second, out)
        self.item_embedding = SlotEmbedding("item", dim, user_slots, slots)
        self.item_fc1 = ItemInput((slots - user_slots) * dim + dense, first)
        self.item_fc2 = fully_connected(first, second)
        self.item_fc3 = fully_connected(second, out)
        self.positive_score = nn.CosineSimilarity(dim=1)
        self.item_softmax = nn.Softmax(dim=1)
        self.least_probable = LeastProbable(NEGATIVES)
        self.negative_embedding = NegativeEmbedding(out, dim)
        self.negative_fc1 = fully_connected(NEGATIVES * dim, second)
        self.negative_fc2 = fully_connected(second, out)
        self.negative_score = nn.CosineSimilarity(dim=1)
        self.hinge = Hinge()

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and numbers [B, dense]."""
        user = self.user_fc3(self.user_fc2(self.user_fc1(self.user_embedding(sparse))))
        item = self.item_fc1(self.item_embedding(sparse), dense)
        item = self.item_fc3(self.item_fc2(item))
        positive = self.positive_score(item, user)
        negatives = self.negative_embedding(self.least_probable(self.item_softmax(item)))
        negatives = self.negative_fc2(self.negative_fc1(negatives))
        logits: Tensor = self.hinge(positive, self.negative_score(negatives, user))
        return logits


def fully_connected(inputs: int, outputs: int) -> nn.Sequential:
    """A layer with its activation, normal of deviation 1 / sqrt(inputs) as published."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=inputs**-0.5)
    return nn.Sequential(linear, nn.ReLU())


def build(slots: int, dense: int, dim: int = 10, user_slots: int = 12) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return MatchNet(slots, dense, dim, user_slots)
