"""One PyTorch process on two threads: `nn.EmbeddingBag(sparse=True)`, sparse Adagrad, Adam."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.ctr.peers.torch_net import batches, tower
from bench.ctr.peers.turns import Trainer, given_data, given_threads, serve
from bench.ctr.shape import (
    ACCUMULATOR,
    DENSE_RATE,
    DIM,
    EACH,
    EPSILON,
    LEARNING_RATE,
    SLOTS,
    first_rows,
)


def make() -> Trainer:
    torch.set_num_threads(given_threads())
    table = nn.EmbeddingBag(SLOTS * EACH, DIM, mode="sum", sparse=True)
    with torch.no_grad():
        for slot, rows in enumerate(table.weight.split(EACH)):
            rows.copy_(torch.from_numpy(first_rows(slot)))
    top, some = tower(), batches(given_data())
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

    def read(numbers: NDArray[np.int64]) -> Tensor:
        return table.weight.detach()[torch.from_numpy(numbers)]

    return Trainer(step, read)


if __name__ == "__main__":
    serve(make)
