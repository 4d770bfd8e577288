"""HeterPS: `ParameterClient` and its shards by streams, as between hosts, exact Adagrad, any key.

Measures the public calls: the client finds the distinct keys, sums gradients and spreads rows,
all in the time of a call. Leaves out checkpoints, eviction and compression of rows, and the
shared memory that client and shards of one host use by default: `heterps_shm` has that.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from bench.ps.peers.client import run
from bench.ps.peers.peer import EPSILON, INITIAL_ACCUMULATOR, LEARNING_RATE, Batch, Floats, Peer
from ps import LocalShards, ParameterClient

_TABLE = "rows"


class HeterPS(Peer):
    """One client, `LocalShards`."""

    shared_memory = False
    streams = True

    def start(self) -> Sequence[int]:
        self._shards = LocalShards(self.setting.shards)
        self._client = ParameterClient(
            self._shards.addresses, shared_memory=self.shared_memory, streams=self.streams
        )
        self._client.create_table(
            _TABLE,
            dim=self.setting.dim,
            optimizer="adagrad",
            learning_rate=LEARNING_RATE,
            initial_accumulator=INITIAL_ACCUMULATOR,
            epsilon=EPSILON,
        )
        return [child.pid for child in self._shards.processes]

    def versions(self) -> dict[str, str]:
        names = ("grpcio", "protobuf", "numpy")
        return {"heterps": _own_version(), **{name: version(name) for name in names}}

    def pull(self, batch: Batch, mode: str) -> Floats:
        return self._client.pull(_TABLE, batch.keys)

    def push(self, batch: Batch, mode: str) -> None:
        self._client.push(_TABLE, batch.keys, batch.grads)

    def read(self, batch: Any) -> Floats:
        return np.asarray(self.pull(batch, ""))

    def close(self) -> None:
        self._client.close()
        self._shards.close()


def _own_version() -> str:
    try:
        return version("heterps")
    except ModuleNotFoundError:
        return "source tree"


if __name__ == "__main__":
    run(HeterPS)
