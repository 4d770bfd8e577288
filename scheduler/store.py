"""What the scheduler must not forget, in Redis: jobs, decisions, the queue, logs and leases.

Keys: `heterps:jobs` (ids by submission), `heterps:job:ID` (hash: spec, status, state, decision,
replan), `heterps:queue` (list), `heterps:log:ID` (hash by process), `heterps:node:ID` (with a time
to live), `heterps:nodes` (their ids), `heterps:scheduler` (who is in charge, with a time to live).
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    FAILED,
    QUEUED,
    SUCCEEDED,
    JobState,
    JobStatus,
    NodeStatus,
    Replan,
)
from scheduler import redis_tls

PREFIX = "heterps:"
TERMINAL = frozenset((SUCCEEDED, FAILED, CANCELLED))
TIMEOUT_S = 5.0

# Every script checks and writes in one step: two callers can never both win.
_SUBMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'status', ARGV[3], 'state', ARGV[4])
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[1])
return 1
"""
_UPDATE = """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return -1 end
if tonumber(state) >= tonumber(ARGV[4]) then return 0 end
if tonumber(ARGV[3]) < tonumber(state) then return -2 end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'state', ARGV[3])
if tonumber(ARGV[3]) ~= tonumber(ARGV[5]) then redis.call('LREM', KEYS[2], 0, ARGV[1]) end
return 1
"""
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class StoreError(RuntimeError):
    """Redis cannot be reached or refused; names its address."""


class TransitionError(RuntimeError):
    """A change of state that may not happen."""


class Store:
    """Typed access to Redis; safe to use from many threads.

    Args:
        url: such as redis://127.0.0.1:6379/0.

    Raises:
        StoreError: from every method, when Redis does not answer within 5 s.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._address = urlsplit(url).netloc.rpartition("@")[2] or url  # never a password
        try:
            self._redis = redis.Redis.from_url(
                url,
                **redis_tls.options(url),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
                retry_on_error=[redis.ConnectionError],
                health_check_interval=15,
            )
        except ValueError as error:
            raise StoreError(
                f"redis {self._address}: {error}; expected redis://HOST:PORT/DB"
            ) from None

    def ping(self) -> None:
        """Check that Redis answers."""
        self._do("PING")

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    # Jobs

    def submit(self, status: JobStatus, spec: JobSpec) -> bool:
        """Keep and queue a job; False, and nothing changes, when its id is known."""
        keys = (_job(status.job_id), PREFIX + "queue", PREFIX + "jobs")
        values = (
            status.job_id,
            spec.SerializeToString(),
            _bare(status).SerializeToString(),
            status.state,
        )
        return self._script(_SUBMIT, keys, values) == 1

    def update(self, status: JobStatus) -> bool:
        """Write a job's status; False, and nothing changes, when it has already ended.

        A job that leaves QUEUED leaves the queue in the same step.

        Raises:
            TransitionError: the job is unknown, or would go back to an earlier state.
        """
        keys = (_job(status.job_id), PREFIX + "queue")
        bare = _bare(status).SerializeToString()
        values = (status.job_id, bare, status.state, SUCCEEDED, QUEUED)
        result = self._script(_UPDATE, keys, values)
        if result == -1:
            raise TransitionError(f"job {status.job_id}: unknown; expected a submitted job")
        if result == -2:
            state = JobState.Name(status.state)
            raise TransitionError(f"job {status.job_id}: cannot go back to {state}")
        return result == 1

    def statuses(self) -> list[JobStatus]:
        """All jobs in the order of submission, without their specs."""
        ids = [name.decode() for name in self._do("LRANGE", PREFIX + "jobs", 0, -1)]
        return [status for job_id in ids if (status := self.status(job_id)) is not None]

    def status(self, job_id: str) -> JobStatus | None:
        """One job, without its spec; None when unknown."""
        data = self._do("HGET", _job(job_id), "status")
        return None if data is None else JobStatus.FromString(data)

    def spec(self, job_id: str) -> JobSpec | None:
        """What was submitted; None when unknown."""
        data = self._do("HGET", _job(job_id), "spec")
        return None if data is None else JobSpec.FromString(data)

    def queue(self) -> list[str]:
        """Ids of the jobs that wait, first come first."""
        return [name.decode() for name in self._do("LRANGE", PREFIX + "queue", 0, -1)]

    def put_decision(self, job_id: str, decision: Decision) -> None:
        """Keep a job's decision."""
        self._do("HSET", _job(job_id), "decision", decision.SerializeToString())

    def decision(self, job_id: str) -> Decision | None:
        """A job's decision; None before there is one."""
        data = self._do("HGET", _job(job_id), "decision")
        return None if data is None else Decision.FromString(data)

    def decisions(self, limit: int = 0) -> list[tuple[JobStatus, Decision]]:
        """Those of the latest `limit` jobs (0: of all) that have one, in the order of submission.

        Two round trips, however many there are.
        """
        ids = [name.decode() for name in self._do("LRANGE", PREFIX + "jobs", -limit, -1)]
        pipe = self._redis.pipeline(transaction=False)
        for job_id in ids:
            pipe.hmget(_job(job_id), "status", "decision")
        return [
            (JobStatus.FromString(status), Decision.FromString(decision))
            for status, decision in self._run(pipe.execute)
            if status is not None and decision is not None
        ]

    def put_replan(self, job_id: str, record: Replan) -> None:
        """Keep what a job's run was measured to take, and the proposal that stands."""
        self._do("HSET", _job(job_id), "replan", record.SerializeToString())

    def replan(self, job_id: str) -> Replan | None:
        """What `put_replan` kept; None before anything was measured."""
        data = self._do("HGET", _job(job_id), "replan")
        return None if data is None else Replan.FromString(data)

    # Logs of ended processes

    def put_log(self, job_id: str, process: str, start: int, data: bytes) -> None:
        """Keep the end of a process's log, which begins `start` bytes into it."""
        self._do("HSET", PREFIX + f"log:{job_id}", process, b"%d\n" % start + data)

    def logs(self, job_id: str) -> dict[str, tuple[int, bytes]]:
        """The kept logs of a job: start and bytes by process."""
        found = cast(dict[bytes, bytes], self._do("HGETALL", PREFIX + f"log:{job_id}"))
        logs = {}
        for process, value in found.items():
            start, _, data = value.partition(b"\n")
            logs[process.decode()] = (int(start), data)
        return logs

    # Leases

    def put_node(self, node: NodeStatus, lease_s: float) -> None:
        """Keep a node for as long as its lease."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.set(_node(node.node_id), node.SerializeToString(), px=int(lease_s * 1000))
        pipe.sadd(PREFIX + "nodes", node.node_id)
        self._run(pipe.execute)

    def drop_node(self, node_id: str) -> None:
        """Forget a node that has left."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.delete(_node(node_id))
        pipe.srem(PREFIX + "nodes", node_id)
        self._run(pipe.execute)

    def nodes(self) -> list[tuple[NodeStatus, float]]:
        """Nodes with a lease, and the seconds left of it; expired ones are forgotten."""
        ids = sorted(name.decode() for name in self._do("SMEMBERS", PREFIX + "nodes"))
        found: list[tuple[NodeStatus, float]] = []
        for node_id in ids:
            data = self._do("GET", _node(node_id))
            left = self._do("PTTL", _node(node_id))
            if data is None or left <= 0:
                self._do("SREM", PREFIX + "nodes", node_id)
            else:
                found.append((NodeStatus.FromString(data), left / 1000))
        return found

    # Who is in charge

    def hold(self, holder: str, lease_s: float) -> bool:
        """Take or renew the right to schedule; False while another holds it."""
        keys, values = (PREFIX + "scheduler",), (holder, int(lease_s * 1000))
        return self._script(_HOLD, keys, values) == 1

    def holder(self) -> str:
        """Who holds the right to schedule; empty when nobody does."""
        data = self._do("GET", PREFIX + "scheduler")
        return "" if data is None else cast(str, data.decode())

    def release(self, holder: str) -> None:
        """Give the right back."""
        self._script(_RELEASE, (PREFIX + "scheduler",), (holder,))

    def _script(self, script: str, keys: Sequence[str], values: Iterable[Any]) -> int:
        return int(self._do("EVAL", script, len(keys), *keys, *values))

    def _do(self, *command: Any) -> Any:
        return self._run(lambda: cast(Any, self._redis).execute_command(*command))

    def _run(self, action: Any) -> Any:
        try:
            return action()
        except redis.RedisError as error:
            raise StoreError(f"redis {self._address}: {error}") from error


def _job(job_id: str) -> str:
    return PREFIX + f"job:{job_id}"


def _node(node_id: str) -> str:
    return PREFIX + f"node:{node_id}"


def _bare(status: JobStatus) -> JobStatus:
    """The status without the spec, which is kept once, beside it."""
    if not status.HasField("job"):
        return status
    bare = JobStatus()
    bare.CopyFrom(status)
    bare.ClearField("job")
    return bare
