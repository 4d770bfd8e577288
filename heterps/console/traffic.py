"""What the shards of running jobs hold and move, asked for now and then and kept for a while."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from chassis.channels import RpcError, call, connect, showing
from heterps.client.records import State
from heterps.errors import HeterpsError
from protos.history_pb2 import ShardPlace
from protos.naming import table_prefix
from protos.parameter_server_pb2 import StatsRequest
from protos.parameter_server_pb2_grpc import ParameterServerStub

if TYPE_CHECKING:
    from heterps.client.client import Client

EVERY_S = 3.0
_ANSWER_S = 2.0
_KEPT = 600  # samples of a job: half an hour
_MOST_JOBS = 32
_log = logging.getLogger("heterps.console")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard's figures of one job's tables, counted since it began; or why there are none."""

    label: str
    address: str
    problem: str = ""
    rows: int = 0
    memory_bytes: int = 0
    pulled: int = 0
    pushed: int = 0
    missed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """All shards at a time, in seconds since the epoch."""

    at: float
    shards: Sequence[Shard]

    def total(self, name: str) -> int:
        """A count over all shards."""
        return sum(getattr(shard, name) for shard in self.shards)


@dataclass(slots=True)
class Traffic:
    """Asks the shards of running jobs every few seconds, on a thread of its own."""

    client: "Client"
    _jobs: "OrderedDict[str, deque[Sample]]" = field(default_factory=OrderedDict)
    _channels: dict[tuple[str, str], grpc.Channel] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, job_id: str) -> Sequence[Sample]:
        """What was seen of a job's shards, the oldest first."""
        with self._lock:
            return list(self._jobs.get(job_id, ()))

    def loop(self, stop: threading.Event) -> None:
        """Ask until `stop`."""
        with ThreadPoolExecutor(8, thread_name_prefix="shards") as pool:
            while not stop.wait(EVERY_S):
                try:
                    self._ask(pool)
                except HeterpsError as error:
                    _log.debug("%s", error)  # the scheduler is away; the pages say so
                except Exception:
                    _log.exception("asking the shards")
        for channel in self._channels.values():
            channel.close()

    def _ask(self, pool: ThreadPoolExecutor) -> None:
        running = [
            job.job_id for job in self.client.jobs(unended=True) if job.state is State.RUNNING
        ]
        places = {job_id: list(self.client.history(job_id).shards) for job_id in running}
        needed = {(one.address, one.token) for found in places.values() for one in found}
        for place in [known for known in self._channels if known not in needed]:
            self._channels.pop(place).close()
        for job_id, found in places.items():
            if not found:
                continue
            seen = list(pool.map(lambda place, j=job_id: self._shard(j, place), found))
            with self._lock:
                self._jobs.setdefault(job_id, deque(maxlen=_KEPT)).append(Sample(time.time(), seen))
                while len(self._jobs) > _MOST_JOBS:
                    self._jobs.popitem(last=False)

    def _shard(self, job_id: str, place: ShardPlace) -> Shard:
        label, address = place.label, place.address
        key = address, place.token
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = connect(address, showing(place.token))
        try:
            what = f"shard at {address}: figures"
            stub = ParameterServerStub(channel)
            stats = call(stub.Stats, StatsRequest(), what=what, timeout_s=_ANSWER_S)
        except RpcError as error:
            _log.debug("%s", error)
            return Shard(label, address, "does not answer from here")
        tables = [one for one in stats.tables if one.name.startswith(table_prefix(job_id))]
        return Shard(
            label,
            address,
            rows=sum(one.rows + one.disk_rows for one in tables),
            memory_bytes=sum(one.bytes for one in tables),
            pulled=sum(one.pulled for one in tables),
            pushed=sum(one.pushed for one in tables),
            missed=sum(one.missed for one in tables),
            bytes_in=stats.bytes_in,
            bytes_out=stats.bytes_out,
        )


def rates(samples: Sequence[Sample], name: str) -> list[tuple[float, float]]:
    """A count's growth a second, by the time of its end; a shard that began anew counts as 0."""
    made = []
    for before, after in pairwise(samples):
        passed = after.at - before.at
        if passed > 0:
            made.append((after.at, max(0.0, (after.total(name) - before.total(name)) / passed)))
    return made
