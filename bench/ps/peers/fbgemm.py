"""FBGEMM's table-batched embedding on the CPU, in the client's own process, exact Adagrad.

A pull is its forward, a push its backward with the update fused into it; a push alone is timed
after a forward that is not. Static array of rows with numbers known beforehand, no network and no
other process: what a single machine's memory gives. Ids in bags of one or without bags, whichever
is faster.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bench.ps.peers.client import run
from bench.ps.peers.peer import EPSILON, INITIAL_ACCUMULATOR, LEARNING_RATE, Batch, Floats, Peer

_KINDS = {"adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}


@dataclass(slots=True)
class Prepared:
    """A batch as tensors."""

    numbers: Tensor
    offsets: Tensor
    grads: Tensor


class Fbgemm(Peer):
    """One table-batched embedding with one table."""

    dynamic: ClassVar[bool] = False

    def start(self) -> Sequence[int]:
        batch = self.prepare(self.data.workloads["zipf"][0])
        choices = {pooling: self._make(pooling) for pooling in ("NONE", "SUM")}
        best = min(choices, key=lambda pooling: _seconds(choices[pooling], batch))
        choices.clear()
        self._pooling = best
        self._rows: Any = None
        self._out: Tensor | None = None
        return []

    def versions(self) -> dict[str, str]:
        return {"fbgemm-gpu-cpu": version("fbgemm-gpu-cpu"), "torch": torch.__version__}

    def fill(self) -> None:
        self._rows = self._make(self._pooling)
        self._rows.init_embedding_weights_uniform(-0.01, 0.01)
        self._rows.split_optimizer_states()[0][0].fill_(INITIAL_ACCUMULATOR)

    def prepare(self, batch: Batch) -> Prepared:
        offsets = torch.arange(len(batch.rows) + 1)
        return Prepared(torch.from_numpy(batch.rows), offsets, torch.from_numpy(batch.grads))

    def before(self, op: str, batch: Prepared, mode: str) -> None:
        self._out = self._rows(batch.numbers, batch.offsets) if op == "push" else None

    def pull(self, batch: Prepared, mode: str) -> Tensor:
        self._out = self._rows(batch.numbers, batch.offsets)
        return self._out

    def push(self, batch: Prepared, mode: str) -> None:
        assert self._out is not None
        self._out.backward(batch.grads)
        self._out = None

    def read(self, batch: Any) -> Floats:
        return np.asarray(self.pull(batch, "").detach().numpy())

    def _make(self, pooling: str) -> Any:
        import_module("fbgemm_gpu")
        training: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs: Any = import_module("fbgemm_gpu.split_embedding_configs")
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        return training.SplitTableBatchedEmbeddingBagsCodegen(
            [(len(self.data.universe), self.setting.dim, *place)],
            optimizer=configs.EmbOptimType[_KINDS[self.optimizer]],
            learning_rate=LEARNING_RATE,
            eps=EPSILON,
            pooling_mode=common.PoolingMode[pooling],
        )


def _seconds(rows: Any, batch: Prepared) -> float:
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        rows(batch.numbers, batch.offsets).backward(batch.grads)
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    run(Fbgemm)
