"""A plain Python gRPC server with a dictionary of rows: what a few lines of code give.

Same channel and server options as HeterPS; each distinct key is sent once, found by the client,
which also sums gradients; exact Adagrad on the server, vectorised over the rows of a request. Rows
are `bytes` in a `dict`; rows not seen before are zeros. Leaves out exactly-once, checks, locks.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import numpy as np

from bench.ps.peers import children
from bench.ps.peers.client import run
from bench.ps.peers.peer import (
    INITIAL_ACCUMULATOR,
    Batch,
    Floats,
    Peer,
    adagrad,
    shard_positions,
)
from bench.ps.peers.sums import distinct_keys, distinct_with_sums
from chassis.channels import connect
from chassis.servers import Server

_SERVICE = "bench.Dictionary"


class GrpcDict(Peer):
    """One client, one dictionary a shard."""

    def start(self) -> Sequence[int]:
        arguments = ["--serve", str(self.setting.dim)]
        count = self.setting.shards
        self._servers = [
            children.start("bench.ps.peers.grpc_dict", arguments) for _ in range(count)
        ]
        channels = [connect(child.wait_ready()) for child in self._servers]
        self._pulls: list[Any] = [channel.unary_unary(f"/{_SERVICE}/Pull") for channel in channels]
        self._pushes: list[Any] = [channel.unary_unary(f"/{_SERVICE}/Push") for channel in channels]
        self._pool = ThreadPoolExecutor(count)
        return [child.pid for child in self._servers]

    def versions(self) -> dict[str, str]:
        return {"grpcio": version("grpcio")}

    def pull(self, batch: Batch, mode: str) -> Floats:
        unique, inverse = distinct_keys(batch.keys)
        parts = shard_positions(unique, self.setting.shards)
        requests = [unique[part].tobytes() for part in parts]
        rows = np.empty((len(unique), self.setting.dim), np.float32)
        replies = self._pool.map(lambda call, request: call(request), self._pulls, requests)
        for part, reply in zip(parts, replies, strict=True):
            rows[part] = np.frombuffer(reply, np.float32).reshape(len(part), -1)
        return rows[inverse]

    def push(self, batch: Batch, mode: str) -> None:
        unique, sums = distinct_with_sums(batch)
        parts = shard_positions(unique, self.setting.shards)
        requests = [unique[part].tobytes() + sums[part].tobytes() for part in parts]
        list(self._pool.map(lambda call, request: call(request), self._pushes, requests))

    def close(self) -> None:
        for child in self._servers:
            child.stop()


class Store:
    """The rows of a shard."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._weights: dict[int, bytes] = {}
        self._squares: dict[int, bytes] = {}
        self._zeros = bytes(4 * dim)
        self._first = np.full(dim, INITIAL_ACCUMULATOR, np.float32).tobytes()

    def pull(self, request: bytes, _: object = None) -> bytes:
        """Rows of the keys in `request`."""
        keys = np.frombuffer(request, np.int64).tolist()
        found, zeros = self._weights.get, self._zeros
        return b"".join([found(key, zeros) for key in keys])

    def push(self, request: bytes, _: object = None) -> bytes:
        """One step of Adagrad."""
        count = len(request) // (8 + 4 * self._dim)
        ids = np.frombuffer(request, np.int64, count)
        grads = np.frombuffer(request, np.float32, offset=8 * count).reshape(count, -1)
        keys = ids.tolist()
        weights = self._rows(self.pull(request[: 8 * count]))
        found, first = self._squares.get, self._first
        squares = self._rows(b"".join([found(key, first) for key in keys]))
        adagrad(weights, squares, grads)
        size = 4 * self._dim
        for table, values in ((self._weights, weights), (self._squares, squares)):
            data = values.tobytes()
            pieces = (data[at : at + size] for at in range(0, len(data), size))
            table.update(zip(keys, pieces, strict=True))
        return b""

    def _rows(self, data: bytes) -> Floats:
        return np.frombuffer(data, np.float32).reshape(-1, self._dim).copy()


def serve(dim: int) -> None:
    """Be a shard."""
    store = Store(dim)
    server = Server("dictionary")
    server.add(lambda *_: None, None, _SERVICE, {"Pull": store.pull, "Push": store.push})
    children.serve(server.start())


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "--serve" else run(GrpcDict)
