"""TorchRec on gloo: two processes of a thread, each with half of every batch and of the tables.

Tables stand whole on one of the two (`table_wise`), exact Adagrad fused into FBGEMM's kernels;
dense layers on both, their gradients summed by `DistributedDataParallel`. Without TorchRec's
pipeline, which sends ids of the next batch while one is trained: on two cores that is slower.
"""

import datetime
import itertools
import os
import sys
import threading
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.ctr.peers.fbgemm_table import begin, fused, rows_of
from bench.ctr.peers.torch_net import batches, tower
from bench.ctr.peers.turns import Trainer, given_data, serve
from bench.ctr.shape import CHECKED, DENSE_RATE, DIM, EACH, SLOTS, Data
from bench.ps.peers import children

_PROCESSES = 2
_NAMES = [f"s{slot}" for slot in range(SLOTS)]
_PORT = 4  # of the arguments, where it is the second process


class _Net(nn.Module):
    """Loss of a batch."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.tower = tower()

    def forward(self, ids: Any, dense: Tensor, labels: Tensor) -> Tensor:
        vectors = self.embeddings(ids).values()
        logits = self.tower(torch.cat([vectors, dense], 1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, labels)


class _Process:
    """One of the two."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        rec, parallel, plans, bags, types = map(
            import_module,
            (
                "torchrec",
                "torchrec.distributed.model_parallel",
                "torchrec.distributed.sharding_plan",
                "torchrec.distributed.embeddingbag",
                "torchrec.distributed.types",
            ),
        )
        # In the order of slots, so that vectors come in it.
        owners = [slot * _PROCESSES // SLOTS for slot in range(SLOTS)]
        self._own = [slot for slot in range(SLOTS) if owners[slot] == rank]
        configs = [
            rec.EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=EACH, feature_names=[name]
            )
            for name in _NAMES
        ]
        net = _Net(rec.EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
        sharder = bags.EmbeddingBagCollectionSharder(fused_params=fused())
        plan = plans.construct_module_sharding_plan(
            net.embeddings,
            {
                name: plans.table_wise(rank=owner, compute_kernel="fused")
                for name, owner in zip(_NAMES, owners, strict=True)
            },
            sharder,
            local_size=_PROCESSES,
            world_size=_PROCESSES,
            device_type="cpu",
        )
        self._model = parallel.DistributedModelParallel(
            net,
            device=torch.device("cpu"),
            plan=types.ShardingPlan(plan={"embeddings": plan}),
            sharders=[sharder],
        )
        codegen = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        kinds = codegen.SplitTableBatchedEmbeddingBagsCodegen
        sharded = bags.ShardedEmbeddingBagCollection
        (found,) = (one for one in self._model.modules() if isinstance(one, sharded))
        inside = (one for lookup in found._lookups for one in lookup.modules())
        (self._table,) = (one for one in inside if isinstance(one, kinds))
        begin(self._table, self._own)
        dense = [
            weight for name, weight in self._model.named_parameters() if ".tower." in f".{name}"
        ]
        self._of_top = torch.optim.Adam(dense, DENSE_RATE)
        self._batches = [
            (_jagged(rec, rows), dense, labels)
            for rows, dense, labels in batches(given_data(), rank, _PROCESSES)
        ]

    def step(self, number: int) -> float:
        self._of_top.zero_grad()
        loss: Tensor = self._model(*self._batches[number % len(self._batches)])
        loss.backward()
        self._of_top.step()
        loss = loss.detach()
        if number < CHECKED:  # the mean over the batch; afterwards that is spared
            loss /= _PROCESSES
            dist.all_reduce(loss)
        return float(loss)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        own = dict(zip(self._own, self._table.split_embedding_weights(), strict=True))
        rows = torch.from_numpy(rows_of(numbers, own))
        dist.all_reduce(rows)  # zeros where the other process has them
        return rows.numpy()


def _jagged(rec: Any, rows: Tensor) -> Any:
    """Keys [B, slots] as one id of each slot in its own table."""
    values = (rows - torch.arange(SLOTS) * EACH).T.contiguous().view(-1)
    lengths = torch.ones(len(values), dtype=torch.int32)
    return rec.KeyedJaggedTensor(keys=_NAMES, values=values, lengths=lengths)


def _join(rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    # It waits for the other one while peers have their turns.
    patience = datetime.timedelta(days=1)
    dist.init_process_group("gloo", rank=rank, world_size=_PROCESSES, timeout=patience)


def _second(port: str) -> None:
    """Train whenever the first one does, until that ends."""
    os.dup2(2, 1)  # nobody reads what is said there
    threading.Thread(target=_end_with_input, daemon=True).start()
    _join(1, port)
    process = _Process(1)
    for number in range(CHECKED):
        process.step(number)
    process.read(Data.load(given_data()).checked())
    for number in itertools.count(CHECKED):
        process.step(number)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def make() -> Trainer:
    port = str(children.free_port())
    other = children.start("bench.ctr.peers.torchrec", [*sys.argv[1:_PORT], port])
    _join(0, port)
    process = _Process(0)
    return Trainer(process.step, process.read, workers=[other.pid])


if __name__ == "__main__":
    if len(sys.argv) > _PORT:
        _second(sys.argv[_PORT])
    else:
        serve(make)
