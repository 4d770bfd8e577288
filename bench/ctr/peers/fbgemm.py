"""FBGEMM's table-batched embedding in one process on two threads, exact Adagrad fused; Adam."""

import sys
from importlib import import_module
from typing import Any

import torch
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
    SLOTS,
)


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    import_module("fbgemm_gpu")
    training: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs: Any = import_module("fbgemm_gpu.split_embedding_configs")
    place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(KEYS // SLOTS, DIM, *place)] * SLOTS,
        optimizer=configs.EmbOptimType.EXACT_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPSILON,
        pooling_mode=common.PoolingMode.SUM,
    )
    table.init_embedding_weights_uniform(-SCALE, SCALE)
    for states in table.split_optimizer_states():
        states[0].fill_(ACCUMULATOR)
    top = tower()
    of_top = torch.optim.Adam(top.parameters(), DENSE_RATE)
    # A table takes its own numbers, slot by slot.
    some = [
        ((rows - torch.arange(SLOTS) * (KEYS // SLOTS)).T.contiguous().view(-1), dense, labels)
        for rows, dense, labels in batches(sys.argv[1])
    ]
    offsets = torch.arange(len(some[0][0]) + 1)

    def step(number: int) -> float:
        rows, dense, labels = some[number % len(some)]
        logits = top(torch.cat([table(rows, offsets), dense], 1)).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, labels)
        of_top.zero_grad()
        loss.backward()
        of_top.step()
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
