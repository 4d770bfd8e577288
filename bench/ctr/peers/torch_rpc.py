"""A parameter server of PyTorch's RPC: one worker and one server of a thread each, over TCP.

The worker sends distinct row numbers, gets rows, and pushes their summed gradients; the server has
a static array and exact Adagrad. Shared memory between the two is switched off.
"""

import os
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import rpc
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.ctr.peers.torch_net import batches, tower
from bench.ctr.peers.turns import Trainer, given_data, serve
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
from bench.ps.peers import children

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
_rows: list[Tensor] = []


def make_table() -> None:
    """The server's table."""
    _rows[:] = [torch.empty(SLOTS * EACH, DIM), torch.full((SLOTS * EACH, DIM), ACCUMULATOR)]
    for slot, rows in enumerate(_rows[0].split(EACH)):
        rows.copy_(torch.from_numpy(first_rows(slot)))


def pull(numbers: Tensor) -> Tensor:
    """Rows of distinct numbers."""
    return _rows[0].index_select(0, numbers)


def push(numbers: Tensor, grads: Tensor) -> None:
    """Exact Adagrad of distinct rows."""
    weights, sums = _rows
    state = sums.index_select(0, numbers).addcmul_(grads, grads)
    sums.index_copy_(0, numbers, state)
    changed = weights.index_select(0, numbers)
    changed.addcdiv_(grads, state.sqrt_().add_(EPSILON), value=-LEARNING_RATE)
    weights.index_copy_(0, numbers, changed)


def _join(name: str, rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def make() -> Trainer:
    port = str(children.free_port())
    server = children.start("bench.ctr.peers.torch_rpc", ["--serve", port])
    _join("worker", 0, port)
    rpc.rpc_sync("server", make_table)
    top, some = tower(), batches(given_data())
    of_top = torch.optim.Adam(top.parameters(), DENSE_RATE)

    def step(number: int) -> float:
        rows, dense, labels = some[number % len(some)]
        unique, inverse = torch.unique(rows.reshape(-1), return_inverse=True)
        vectors = rpc.rpc_sync("server", pull, (unique,)).index_select(0, inverse)
        vectors = vectors.view(len(rows), SLOTS * DIM).requires_grad_()
        logits = top(torch.cat([vectors, dense], 1)).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, labels)
        of_top.zero_grad()
        loss.backward()
        assert vectors.grad is not None
        grads = torch.zeros(len(unique), DIM)
        grads.index_add_(0, inverse, vectors.grad.view(-1, DIM))
        pushed = rpc.rpc_async("server", push, (unique, grads))
        of_top.step()
        pushed.wait()
        return float(loss)

    def read(numbers: NDArray[np.int64]) -> Tensor:
        rows: Tensor = rpc.rpc_sync("server", pull, (torch.from_numpy(numbers),))
        return rows

    return Trainer(step, read, servers=[server.pid])


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _join("server", 1, sys.argv[2])
        children.serve()
    else:
        serve(make)
