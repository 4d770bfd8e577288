"""A job of sleeping layers on a cluster here: its steps, and whose processor they took."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.scale.job import BACK, FRONT, SERVER, Case, begun, worker_pids, write_job
from bench.watch import Watch
from heterps import Client, Cluster

_WARM = 8  # steps until caches are warm and the pipeline is steady
_EVERY_S = 0.2
_TICK = os.sysconf("SC_CLK_TCK")
MOST_UNITS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a job, over its steady steps.

    Attributes:
        step_s: seconds a step, mean.
        spread: standard deviation of single steps over it.
        worker_cpu_s: processor seconds of a worker in a step; `shard_cpu_s` of a shard.
        busy: share of all cores that was used, by whomever.
    """

    kind: str
    front: int
    back: int
    staleness: int
    steps: int
    step_s: float
    spread: float
    worker_cpu_s: float
    shard_cpu_s: float
    busy: float


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Of types that all stand for parts of this machine."""
    types = {FRONT: MOST_UNITS, BACK: MOST_UNITS, SERVER: 1}
    with Cluster(folder, types, list(types), devices=dict.fromkeys(types, "cpu")) as made:
        yield made


def measure(client: Client, folder: Path, case: Case, seconds: float) -> Measured:
    """Run a job for about so many steady seconds.

    Raises:
        ValueError: it failed, or did not train each sample of each step once.
    """
    steps = _WARM + 2 + max(20, round(seconds / (case.seconds * case.rounds * 1.3)))
    job = write_job(folder, case, steps)
    with _Processors() as used:
        job_id = client.submit(job)
        status = client.wait(job_id)
    if status.state != "succeeded":
        raise ValueError(f"{case.name}: {job_id} failed: {status.reason}")
    units = [stage.units for stage in client.decision(job_id).stages]
    if units != [n for n in (case.front, case.back) if n]:
        raise ValueError(f"{case.name}: was given {units} units")
    marks = begun(folder, case)
    seen = np.cumsum([0, *(samples for _, samples in marks)])
    if seen[-1] != case.batch * steps:
        raise ValueError(f"{case.name}: {seen[-1]} samples, expected {steps} steps")
    firsts = [int(np.searchsorted(seen, case.batch * step)) for step in range(_WARM, steps)]
    at = np.array([marks[first][0] for first in firsts])
    each = np.diff(at)
    span = float(at[0]), float(at[-1])
    workers = [used.seconds(pid, span) for pid in worker_pids(folder)]
    shards = [used.seconds(pid, span) for pid in used.shards]
    if len(workers) != case.workers:
        raise ValueError(f"{case.name}: {len(workers)} workers wrote down their steps")
    return Measured(
        case.kind,
        case.front,
        case.back,
        case.staleness,
        len(each),
        float(each.mean()),
        float(each.std() / each.mean()),
        sum(workers) / len(workers) / len(each),
        sum(shards) / case.shards / len(each),
        used.busy(span),
    )


class _Processors(Watch):
    """What processes have used of the cores, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: set[int] = set()
        self._of: dict[int, list[tuple[float, float]]] = {}
        self._all: list[tuple[float, float]] = []

    def seconds(self, pid: int, span: tuple[float, float]) -> float:
        """Core seconds of a process between two instants of the monotonic clock."""
        return _between(self._of.get(pid, [(0.0, 0.0)]), span)

    def busy(self, span: tuple[float, float]) -> float:
        """Of all cores, the share that was in use."""
        return _between(self._all, span) / float(span[1] - span[0]) / (os.cpu_count() or 1)

    def _watch(self) -> None:
        own = os.getpid()
        while not self._over.wait(_EVERY_S):
            now = time.monotonic()
            self._all.append((now, _cores_s()))
            parents: dict[int, int] = {}
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    used = (int(stat[11]) + int(stat[12])) / _TICK
                    parents[int(entry.name)] = int(stat[1])
                    self._of.setdefault(int(entry.name), []).append((now, used))
                except OSError:
                    continue
            for pid in parents:
                if pid not in self.shards and _descends(pid, own, parents) and _is_shard(pid):
                    self.shards.add(pid)


def _descends(pid: int, from_: int, parents: dict[int, int]) -> bool:
    while pid > 1 and pid != from_:
        pid = parents.get(pid, 0)
    return pid == from_


def _is_shard(pid: int) -> bool:
    try:
        return b"ps.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _between(seen: list[tuple[float, float]], span: tuple[float, float]) -> float:
    times, used = zip(*seen, strict=True)
    first, last = np.interp(span, times, used)
    return float(last - first)


def _cores_s() -> float:
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (fields[0] + fields[2] + fields[5] + fields[6]) / _TICK
