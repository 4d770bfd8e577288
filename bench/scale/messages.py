"""What a message to a shard, and a key in it, take of the cores of client and shard."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from protos.stage_pb2 import COMMITTED, Notice
from ps import LocalShards, ParameterClient
from workers.links.writer import Writer

_SHARDS = 2
_DIM = 16
_FEW, _MANY = 64, 16_384
_TIMES = 60
_WARM = 8
_OPEN = 30  # steps that wait for their commit, of which a shard keeps 64
_HEAD = struct.Struct("!BI")
_TICK = os.sysconf("SC_CLK_TCK")


def message_costs(seed: int = 0) -> dict[str, float]:
    """Processor seconds by the names of `scheduler.simulation.training.Costs`."""
    with LocalShards(_SHARDS) as shards, ParameterClient(shards.addresses) as client:
        pids = [process.pid for process in shards.processes]
        client.create_table("rows", dim=_DIM, optimizer="adagrad", learning_rate=0.01)
        client.create_table("few", dim=_DIM, optimizer="adagrad", learning_rate=0.01)
        rng = np.random.default_rng(seed)
        found = {}
        for table, count in (("few", _FEW), ("rows", _MANY)):
            times = _TIMES * (1 if count == _MANY else 20)
            sets = [rng.choice(1 << 20, count, replace=False).astype(np.uint64) for _ in range(8)]
            gradients = np.ones((count, _DIM), np.float32)
            of = _Calls(client, table, sets, gradients)
            of.all(_WARM)  # rows are made, memory is shared
            found[count] = {
                "pull": _used(pids, of.pull, times),
            }
            pushes, commits = [], []
            for _ in range(times // _OPEN):
                pushes.append(_used(pids, of.stage, _OPEN))
                commits.append(_used(pids, of.commit, _OPEN))
            found[count] |= {"push": _mean(pushes), "commit": _mean(commits)}
    costs = {}
    for what in ("pull", "push", "commit"):
        few, many = found[_FEW][what], found[_MANY][what]
        key = [(m - f) / (_MANY - _FEW) for f, m in zip(few, many, strict=True)]
        message = [max(0.0, f - k * _FEW) / _SHARDS for f, k in zip(few, key, strict=True)]
        costs[f"client_{what}_s"], costs[f"{what}_s"] = key
        costs[f"client_{what}_message_s"], costs[f"{what}_message_s"] = message
    return costs


class _Calls:
    def __init__(
        self,
        client: ParameterClient,
        table: str,
        sets: list[np.ndarray],
        gradients: np.ndarray,
    ) -> None:
        self._client, self._table, self._sets, self._gradients = client, table, sets, gradients
        self._pulled = self._staged = self._committed = 0

    def all(self, times: int) -> None:
        for call in (self.pull, self.stage, self.commit):
            for _ in range(times):
                call()

    def pull(self) -> None:
        keys = self._sets[self._pulled % len(self._sets)]
        self._client.pull_many({self._table: keys}, distinct=True)
        self._pulled += 1

    def stage(self) -> None:
        keys = self._sets[self._staged % len(self._sets)]
        parts: Mapping[str, tuple[np.ndarray, np.ndarray]] = {self._table: (keys, self._gradients)}
        self._client.stage_async(self._table, self._staged, 0, parts, distinct=True).result()
        self._staged += 1

    def commit(self) -> None:
        self._client.commit_async(self._table, self._committed, 1).result()
        self._committed += 1


def _mean(used: list[tuple[float, float]]) -> tuple[float, float]:
    own, shards = zip(*used, strict=True)
    return sum(own) / len(used), sum(shards) / len(used)


def _used(pids: list[int], call: Callable[[], None], times: int) -> tuple[float, float]:
    """Processor seconds of a call: of this process, and of all shards."""
    own, shards = time.process_time(), _seconds(pids)
    for _ in range(times):
        call()
    return (time.process_time() - own) / times, (_seconds(pids) - shards) / times


def _seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(stat[11]) + int(stat[12])
    return total / _TICK


def tell_s(times: int = 20_000) -> float:
    """Processor seconds in which one more worker is told of a step, by the thread that tells."""
    ours, theirs = socket.socketpair()
    drain = threading.Thread(target=_drain, args=(theirs,), daemon=True)
    drain.start()
    writer = Writer(ours, "notices", lambda error: None)
    began = time.thread_time()
    for step in range(times):
        notice = Notice(kind=COMMITTED, step=step, stage=0, rank=1)
        message = notice.SerializeToString()
        writer.send(_HEAD.pack(0, len(message)), message)
    used = time.thread_time() - began
    writer.flush()
    ours.close()
    drain.join()
    return used / times


def _drain(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass
