"""FBGEMM's table-batched embedding in one process, exact Adagrad fused; Adam.

On two threads, or in a turn on as many as it is told.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.ctr.peers.fbgemm_table import begin, rows_of, table
from bench.ctr.peers.torch_net import batches, tower
from bench.ctr.peers.turns import Trainer, given_data, given_threads, serve
from bench.ctr.shape import DENSE_RATE, EACH, SLOTS


def make() -> Trainer:
    torch.set_num_threads(given_threads())
    rows_table = table(SLOTS)
    begin(rows_table, range(SLOTS))
    top = tower()
    of_top = torch.optim.Adam(top.parameters(), DENSE_RATE)
    # A table takes its own numbers, slot by slot.
    some = [
        ((rows - torch.arange(SLOTS) * EACH).T.contiguous().view(-1), dense, labels)
        for rows, dense, labels in batches(given_data())
    ]
    offsets = torch.arange(len(some[0][0]) + 1)

    def step(number: int) -> float:
        rows, dense, labels = some[number % len(some)]
        logits = top(torch.cat([rows_table(rows, offsets), dense], 1)).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, labels)
        of_top.zero_grad()
        loss.backward()
        of_top.step()
        return float(loss)

    def read(numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return rows_of(numbers, dict(enumerate(rows_table.split_embedding_weights())))

    return Trainer(step, read, threads=torch.set_num_threads)


if __name__ == "__main__":
    serve(make)
