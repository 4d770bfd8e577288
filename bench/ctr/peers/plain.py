"""One PyTorch process on two threads: `nn.EmbeddingBag(sparse=True)`, sparse Adagrad, Adam."""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.ctr.peers.turns import batches, serve, tower
from bench.ctr.shape import (
    ACCUMULATOR,
    DENSE_RATE,
    DIM,
    EPSILON,
    KEYS,
    LEARNING_RATE,
    SCALE,
)


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    table = nn.EmbeddingBag(KEYS, DIM, mode="sum", sparse=True)
    nn.init.uniform_(table.weight, -SCALE, SCALE)
    top, some = tower(), batches(sys.argv[1])
    of_rows = torch.optim.Adagrad(
        table.parameters(), LEARNING_RATE, initial_accumulator_value=ACCUMULATOR, eps=EPSILON
    )
    of_top = torch.optim.Adam(top.parameters(), DENSE_RATE)

    def step(number: int) -> float:
        rows, dense, labels = some[number % len(some)]
        vectors = table(rows.reshape(-1, 1)).view(len(rows), -1)
        logits = top(torch.cat([vectors, dense], 1)).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, labels)
        of_rows.zero_grad()
        of_top.zero_grad()
        loss.backward()
        of_rows.step()
        of_top.step()
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
