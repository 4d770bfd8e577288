"""The client process of a peer: takes commands, measures itself, answers in JSON lines.

Its standard output belongs to the answers alone; what libraries print there goes to the log.
"""

import json
import os
import resource
import sys
import time
import traceback
from typing import Any

import numpy as np

from bench.ps.peers.check import largest_error
from bench.ps.peers.peer import Batch, Data, Ints, Peer, Setting

_CALIBRATION = 3
_REST_S = 4.0  # before memory is read: some servers let buffers go when nothing happens
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Client:
    """Runs the commands of the benchmark on one peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._pids: list[int] = []
        self._batches: dict[str, list[Any]] = {}
        self._modes: dict[tuple[str, str], str] = {}
        self._turn = 0
        self._grown = 0

    def start(self) -> dict[str, Any]:
        """Start the shards."""
        self._pids = list(self._peer.start())
        return {"servers": self._pids, "versions": self._peer.versions()}

    def fill(self) -> dict[str, Any]:
        """Bring the universe into the table; how much memory that took."""
        before, began = self._resident(), time.perf_counter()
        self._peer.fill()
        seconds = time.perf_counter() - began
        rows = len(self._peer.data.universe)
        return {"rows": rows, "seconds": seconds, "bytes": self._resident() - before}

    def check(self) -> dict[str, Any]:
        """Compare with the reference."""
        return {"error": largest_error(self._peer)} if self._peer.optimizer else {}

    def warm(self, workload: str, op: str) -> dict[str, Any]:
        """Choose how to do `op`, by trying."""
        if workload not in self._batches:
            given = self._peer.data.workloads[workload]
            self._batches[workload] = [self._peer.prepare(batch) for batch in given]
        if op == "both":
            mode = "; ".join(self._modes[workload, each] for each in ("pull", "push"))
            self._median(workload, op, mode, 1)
        else:
            modes = self._peer.modes(op, workload == "distinct")
            mode = min(modes, key=lambda each: self._median(workload, op, each))
        self._modes[workload, op] = mode
        return {"mode": mode if mode.strip("; ") else ""}

    def measure(self, workload: str, op: str, seconds: float, calls: int) -> dict[str, Any]:
        """Call for so many seconds, at most `calls` times, at least once."""
        mode = self._modes[workload, op]
        latencies: list[float] = []
        client = 0.0
        server = self._server_cpu()
        while len(latencies) < calls and (sum(latencies) < seconds or not latencies):
            took, cpu = self._call(workload, op, mode)
            latencies.append(took)
            client += cpu
        server = self._server_cpu() - server
        return {"latencies": latencies, "client_cpu_s": client, "server_cpu_s": server}

    def grow(self, rows: int) -> dict[str, Any]:
        """Push distinct keys until there are so many, then time what is spread over them."""
        peer, step = self._peer, len(self._peer.data.workloads["zipf"][0].keys)
        grads = peer.data.workloads["zipf"][0].grads
        push = peer.modes("push", True)[0]
        began = time.perf_counter()
        while self._grown < rows:
            count = min(step, rows - self._grown)
            keys = scattered(np.arange(self._grown, self._grown + count))
            peer.push(peer.prepare(Batch(keys, keys, grads[:count], True)), push)
            self._grown += count
        pushed = time.perf_counter() - began
        rng = np.random.default_rng(rows)
        drawn = [rng.choice(rows, min(step, rows), replace=False) for _ in range(3)]
        self._batches["grown"] = [
            peer.prepare(Batch(scattered(d), d, grads[: len(d)], True)) for d in drawn
        ]
        found = {
            op: self._median("grown", op, peer.modes(op, True)[0], 9) / min(step, rows)
            for op in ("pull", "push")
        }
        return {
            "rows": rows,
            "pushed_s": pushed,
            "bytes": self._resident(),
            "peak_bytes": self._resident("VmHWM"),
            "pull_s_a_row": found["pull"],
            "push_s_a_row": found["push"],
        }

    def resident(self) -> dict[str, Any]:
        """Memory of the shards now."""
        return {"bytes": self._resident()}

    def _call(self, workload: str, op: str, mode: str) -> tuple[float, float]:
        batches = self._batches[workload]
        batch = batches[self._turn % len(batches)]
        self._turn += 1
        self._peer.before(op, batch, mode)
        cpu, began = _own_cpu(), time.perf_counter()
        getattr(self._peer, op)(batch, mode)
        took = time.perf_counter() - began
        return took, _own_cpu() - cpu

    def _median(self, workload: str, op: str, mode: str, calls: int = _CALIBRATION) -> float:
        self._call(workload, op, mode)
        return float(np.median([self._call(workload, op, mode)[0] for _ in range(calls)]))

    def _server_cpu(self) -> float:
        total = 0
        for pid in self._pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total * _TICK_S

    def _resident(self, field: str = "VmRSS") -> int:
        if field == "VmRSS":
            time.sleep(_REST_S)
        total = 0
        for pid in self._pids or [os.getpid()]:
            with open(f"/proc/{pid}/status") as file:
                line = next(line for line in file if line.startswith(field))
            total += int(line.split()[1]) << 10
        return total


def scattered(numbers: Ints) -> Ints:
    """Keys of numbers: distinct, spread over 62 bits."""
    # Times an odd constant modulo a power of two: no two numbers meet.
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys: Ints = (mixed & np.uint64((1 << 62) - 1)).astype(np.int64)
    return keys


def run(kind: type[Peer]) -> None:
    """Serve commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = Setting(**json.loads(sys.argv[1]))
    peer = kind(setting, Data.read(setting))
    client = Client(peer)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(client, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    peer.close()
    answers.flush()
    os._exit(0)  # some libraries do not end their threads


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
