"""PyTorch RPC: `torch.distributed.rpc` over TensorPipe's TCP, rows in a static array.

Exact Adagrad on the server with `index_select` and `index_copy_`. Ids are row
numbers known beforehand: no keys are looked up and no rows are made. The client finds distinct
ids with `torch.unique`, or for a pull sends all, whichever is faster; shared memory between the
processes is switched off, as it would be between machines.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

from bench.ps.peers import children, torch_shard
from bench.ps.peers.client import run
from bench.ps.peers.peer import Batch, Floats, Peer
from bench.ps.peers.sums import distinct, sums

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
_CLIENT = "client"


@dataclass(slots=True)
class Prepared:
    """A batch as tensors."""

    numbers: Tensor
    grads: Tensor


class TorchRpc(Peer):
    """One client; shard s holds the rows with number % shards == s."""

    dynamic: ClassVar[bool] = False

    def start(self) -> Sequence[int]:
        shards, port = self.setting.shards, children.free_port()
        self._servers = [
            children.start("bench.ps.peers.torch_rpc", ["--serve", str(i), str(shards), str(port)])
            for i in range(shards)
        ]
        _join(_CLIENT, shards, shards + 1, port)
        return [child.pid for child in self._servers]

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def fill(self) -> None:
        each = -(-len(self.data.universe) // self.setting.shards)
        for shard in range(self.setting.shards):
            rpc.rpc_sync(_name(shard), torch_shard.make, (each, self.setting.dim))

    def modes(self, op: str, distinct: bool) -> tuple[str, ...]:
        if op == "push" and not distinct:
            return ("distinct ids",)
        return ("distinct ids", "ids as they come")

    def prepare(self, batch: Batch) -> Prepared:
        return Prepared(torch.from_numpy(batch.rows), torch.from_numpy(batch.grads))

    def pull(self, batch: Prepared, mode: str) -> Tensor:
        if mode == "ids as they come":
            return self._rows(batch.numbers)
        unique, inverse = distinct(batch.numbers)
        return self._rows(unique).index_select(0, inverse)

    def push(self, batch: Prepared, mode: str) -> None:
        numbers, grads = batch.numbers, batch.grads
        if mode == "distinct ids":
            numbers, inverse = distinct(numbers)
            grads = sums(inverse, grads, len(numbers))
        futures = [
            rpc.rpc_async(
                _name(shard), torch_shard.push, (part, grads if at is None else grads[at])
            )
            for shard, at, part in self._parts(numbers)
        ]
        torch.futures.wait_all(futures)

    def _rows(self, numbers: Tensor) -> Tensor:
        parts = self._parts(numbers)
        futures: list[Any] = [
            rpc.rpc_async(_name(shard), torch_shard.pull, (part,)) for shard, _, part in parts
        ]
        if parts[0][1] is None:
            only: Tensor = futures[0].wait()
            return only
        rows = torch.empty(len(numbers), self.setting.dim)
        for (_, at, _), future in zip(parts, futures, strict=True):
            rows[at] = future.wait()
        return rows

    def _parts(self, numbers: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        count = self.setting.shards
        if count == 1:
            return [(0, None, numbers)]
        owners = numbers % count
        found = [(owners == shard).nonzero().squeeze(1) for shard in range(count)]
        return [
            (s, at, numbers[at].div(count, rounding_mode="floor")) for s, at in enumerate(found)
        ]

    def read(self, batch: Any) -> Floats:
        return np.asarray(self.pull(batch, "distinct ids").numpy())

    def close(self) -> None:
        for child in self._servers:
            child.stop()


def _name(shard: int) -> str:
    return f"shard{shard}"


def _join(name: str, rank: int, world: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        rpc_timeout=120,
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def serve(shard: int, shards: int, port: int) -> None:
    """Be a shard."""
    _join(_name(shard), shard, shards + 1, port)
    children.serve()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*map(int, sys.argv[2:5]))
    else:
        run(TorchRpc)
