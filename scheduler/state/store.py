"""What the scheduler must not forget, in Redis: jobs, decisions, the queue, logs and leases.

Keys: `heterps:jobs` (ids by submission), `heterps:job:ID` (hash: spec, status, state, decision,
plans, replan, run, history, cancelled), `heterps:final:ID` (hash by worker: its last word),
`heterps:queue` (list), `heterps:log:ID` (hash by process), `heterps:tokens` (hash by name),
`heterps:node:ID` (with a time to live), `heterps:nodes` (their ids), `heterps:scheduler` (who
leads, with a time to live),
`heterps:term` (of whoever led last).
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from google.protobuf.message import Message
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from protos.access_pb2 import Token
from protos.decision_pb2 import Decision
from protos.history_pb2 import JobHistory
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    FAILED,
    QUEUED,
    SUCCEEDED,
    JobState,
    JobStatus,
    NodeStatus,
    PlanHistory,
    ProgressReport,
    RecoveryTimes,
    Replan,
    RunRecord,
)
from scheduler.state import redis_tls, scripts

M = TypeVar("M", bound=Message)
PREFIX = "heterps:"
TERMINAL = frozenset((SUCCEEDED, FAILED, CANCELLED))
TIMEOUT_S = 5.0
REMEMBERED_S = 600.0  # where a node was, after its lease: a scheduler that comes back asks there
_HOLDER, _TERM = PREFIX + "scheduler", PREFIX + "term"


class StoreError(RuntimeError):
    """Redis cannot be reached or refused; names its address."""


class DeposedError(StoreError):
    """Another scheduler has led since: nothing was written, and nothing will be."""


class TransitionError(RuntimeError):
    """A change of state that may not happen."""


class Store:
    """Typed access to Redis; safe to use from many threads.

    Every write holds only as long as `term`, which `take` brings, is the latest: the number is a
    fencing token. Without one only a Redis that no scheduler has worked on can be written.

    Args:
        url: such as redis://127.0.0.1:6379/0.

    Raises:
        StoreError: from every method, when Redis does not answer within 5 s.
        DeposedError: from every method that writes, when another scheduler has taken over.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.term = 0
        self.deposed = threading.Event()
        self._address = urlsplit(url).netloc.rpartition("@")[2] or url  # never a password
        try:
            self._redis = redis.Redis.from_url(
                url,
                **redis_tls.options(url),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # A connection that broke is tried again; one that does not answer, for no longer.
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2, (redis.ConnectionError,)),
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
        return self._write(scripts.SUBMIT, keys, values) == 1

    def update(self, status: JobStatus) -> bool:
        """Write a job's status; False, and nothing changes, when it has already ended.

        A job that leaves QUEUED leaves the queue in the same step.

        Raises:
            TransitionError: the job is unknown, or would go back to an earlier state.
        """
        keys = (_job(status.job_id), PREFIX + "queue")
        bare = _bare(status).SerializeToString()
        values = (status.job_id, bare, status.state, SUCCEEDED, QUEUED)
        result = self._write(scripts.UPDATE, keys, values)
        if result == -1:
            raise TransitionError(f"job {status.job_id}: unknown; expected a submitted job")
        if result == -2:
            state = JobState.Name(status.state)
            raise TransitionError(f"job {status.job_id}: cannot go back to {state}")
        return result == 1

    def requeue(self, status: JobStatus) -> bool:
        """Put a job that has not ended back to the head of the queue, and forget its run.

        Raises:
            TransitionError: the job is unknown.
        """
        job_id = status.job_id
        keys = (_job(job_id), PREFIX + "queue", _final(job_id))
        values = (job_id, _bare(status).SerializeToString(), status.state, SUCCEEDED)
        result = self._write(scripts.REQUEUE, keys, values)
        if result == -1:
            raise TransitionError(f"job {job_id}: unknown; expected a submitted job")
        return result == 1

    def forget(self, job_id: str) -> bool:
        """Remove a job that has ended with all that is kept of it; False where it has not."""
        keys = (_job(job_id), _final(job_id), _log(job_id), PREFIX + "jobs")
        return self._write(scripts.FORGET, keys, (job_id, SUCCEEDED)) == 1

    def statuses(self) -> list[JobStatus]:
        """All jobs in the order of submission, without their specs."""
        ids = [name.decode() for name in self._do("LRANGE", PREFIX + "jobs", 0, -1)]
        return [status for job_id in ids if (status := self.status(job_id)) is not None]

    def status(self, job_id: str) -> JobStatus | None:
        """One job, without its spec; None when unknown."""
        return self._read(job_id, "status", JobStatus)

    def spec(self, job_id: str) -> JobSpec | None:
        """What was submitted; None when unknown."""
        return self._read(job_id, "spec", JobSpec)

    def queue(self) -> list[str]:
        """Ids of the jobs that wait, first come first."""
        return [name.decode() for name in self._do("LRANGE", PREFIX + "queue", 0, -1)]

    def put_decision(self, job_id: str, decision: Decision) -> None:
        """Keep a job's decision."""
        self._set(_job(job_id), "decision", decision.SerializeToString())

    def decision(self, job_id: str) -> Decision | None:
        """A job's decision; None before there is one."""
        return self._read(job_id, "decision", Decision)

    def decisions(self, job_ids: Sequence[str]) -> dict[str, Decision]:
        """Those of these jobs that have one, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hget(_job(job_id), "decision")
        found = self._run(pipe.execute)
        return {
            job_id: Decision.FromString(data)
            for job_id, data in zip(job_ids, found, strict=True)
            if data is not None
        }

    def put_replan(self, job_id: str, record: Replan) -> None:
        """Keep what a job's run was measured to take, and the proposal that stands."""
        self._set(_job(job_id), "replan", record.SerializeToString())

    def replan(self, job_id: str) -> Replan | None:
        """What `put_replan` kept; None before anything was measured."""
        return self._read(job_id, "replan", Replan)

    def put_plans(self, job_id: str, history: PlanHistory) -> None:
        """Keep the plans that a job has trained under."""
        self._set(_job(job_id), "plans", history.SerializeToString())

    def plans(self, job_id: str) -> PlanHistory:
        """What `put_plans` kept; empty before the job trained."""
        return self._read(job_id, "plans", PlanHistory) or PlanHistory()

    # Attempts that run

    def put_run(self, job_id: str, record: RunRecord) -> None:
        """Keep what another scheduler needs to follow a run."""
        self._set(_job(job_id), "run", record.SerializeToString())

    def run(self, job_id: str) -> RunRecord | None:
        """What `put_run` kept; None when the job has no run."""
        return self._read(job_id, "run", RunRecord)

    def put_final(self, report: ProgressReport) -> None:
        """Keep a worker's last word: it will not be said again."""
        worker = f"{report.attempt}.{report.stage}.{report.rank}"
        self._set(_final(report.job_id), worker, report.SerializeToString())

    def finals(self, job_id: str) -> list[ProgressReport]:
        """The last words of a job's workers so far."""
        found = cast(dict[bytes, bytes], self._do("HGETALL", _final(job_id)))
        return [ProgressReport.FromString(data) for data in found.values()]

    def put_cancelled(self, job_id: str, user: str) -> None:
        """Keep that `user` has cancelled a job, for whoever works on it next."""
        self._set(_job(job_id), "cancelled", user.encode())

    def cancelled(self, job_id: str) -> str | None:
        """Who has cancelled a job; None where nobody has."""
        found = cast(bytes | None, self._do("HGET", _job(job_id), "cancelled"))
        return None if found is None else found.decode()

    def put_history(self, job_id: str, history: bytes) -> None:
        """Keep a job's history, serialised."""
        self._set(_job(job_id), "history", history)

    def history(self, job_id: str) -> JobHistory | None:
        """What `put_history` kept; None before there was any."""
        return self._read(job_id, "history", JobHistory)

    # Logs of ended processes

    def put_log(self, job_id: str, process: str, start: int, data: bytes) -> None:
        """Keep the end of a process's log, which begins `start` bytes into it."""
        self._set(_log(job_id), process, b"%d\n" % start + data)

    def logs(self, job_id: str) -> dict[str, tuple[int, bytes]]:
        """The kept logs of a job: start and bytes by process."""
        found = cast(dict[bytes, bytes], self._do("HGETALL", _log(job_id)))
        logs = {}
        for process, value in found.items():
            start, _, data = value.partition(b"\n")
            logs[process.decode()] = (int(start), data)
        return logs

    # Tokens

    def put_token(self, token: Token) -> None:
        """Keep a token under its name."""
        self._set(PREFIX + "tokens", token.name, token.SerializeToString())

    def drop_token(self, name: str) -> None:
        """Forget a token."""
        self._write(scripts.DROP_FIELD, (PREFIX + "tokens",), (name,))

    def tokens(self) -> list[Token]:
        """All tokens that are kept."""
        found = cast(dict[bytes, bytes], self._do("HGETALL", PREFIX + "tokens"))
        return [Token.FromString(data) for data in found.values()]

    # What was measured of all jobs

    def put_recovery_times(self, kind: str, times: RecoveryTimes) -> None:
        """Keep how long units of a type that were lost took to be made up for."""
        self._set(PREFIX + "recovery", kind, times.SerializeToString())

    def recovery_times(self) -> dict[str, RecoveryTimes]:
        """The same of all types of which units were lost."""
        found = cast(dict[bytes, bytes], self._do("HGETALL", PREFIX + "recovery"))
        return {kind.decode(): RecoveryTimes.FromString(data) for kind, data in found.items()}

    # Leases

    def put_node(self, node: NodeStatus, lease_s: float) -> None:
        """Keep a node for as long as its lease, and its address for some minutes longer."""
        keys = (_node(node.node_id), PREFIX + "nodes")
        kept_ms = int((lease_s + REMEMBERED_S) * 1000)
        values = (node.node_id, node.SerializeToString(), kept_ms)
        self._write(scripts.PUT_NODE, keys, values)

    def drop_node(self, node_id: str) -> None:
        """Forget a node that has left."""
        self._write(scripts.DROP_NODE, (_node(node_id), PREFIX + "nodes"), (node_id,))

    def nodes(self) -> list[tuple[NodeStatus, float]]:
        """Nodes with a lease, and the seconds left of it."""
        return [(status, left) for status, left in self.known_nodes() if left > 0]

    def known_nodes(self) -> list[tuple[NodeStatus, float]]:
        """Nodes that had a lease some minutes ago and did not say goodbye; seconds left of it."""
        ids = sorted(name.decode() for name in self._do("SMEMBERS", PREFIX + "nodes"))
        found: list[tuple[NodeStatus, float]] = []
        for node_id in ids:
            data = self._do("GET", _node(node_id))
            left = self._do("PTTL", _node(node_id))
            if data is not None:
                found.append((NodeStatus.FromString(data), left / 1000 - REMEMBERED_S))
            else:
                self._write(scripts.DROP_NODE, (_node(node_id), PREFIX + "nodes"), (node_id,))
        return found

    # Leadership

    def take(self, holder: str, lease_s: float) -> bool:
        """Take the right to schedule, with a new `term`; False while another holds it."""
        keys, values = (_HOLDER, _TERM), (holder, int(lease_s * 1000))
        self.term = self._script(scripts.TAKE, keys, values)
        return self.term > 0

    def renew(self, holder: str, lease_s: float) -> bool:
        """Renew the right to schedule; False when another has taken it since."""
        keys, values = (_HOLDER, _TERM), (holder, int(lease_s * 1000), self.term)
        return self._script(scripts.RENEW, keys, values) == 1

    def holder(self) -> str:
        """Who holds the right to schedule; empty when nobody does."""
        data = self._do("GET", _HOLDER)
        return "" if data is None else cast(str, data.decode())

    def release(self, holder: str) -> None:
        """Give the right back."""
        self._script(scripts.RELEASE, (_HOLDER,), (holder,))

    def _read(self, job_id: str, field: str, kind: type[M]) -> M | None:
        data = self._do("HGET", _job(job_id), field)
        return None if data is None else kind.FromString(data)

    def _set(self, key: str, field: str, value: bytes) -> None:
        self._write(scripts.SET_FIELD, (key,), (field, value))

    def _write(self, script: str, keys: Sequence[str], values: Sequence[Any]) -> int:
        try:
            return self._script(script, (*keys, _TERM), (*values, self.term))
        except StoreError as error:
            if isinstance(error.__cause__, redis.ResponseError) and scripts.STALE in str(error):
                self.deposed.set()
                raise DeposedError(
                    f"redis {self._address}: another scheduler works on it; "
                    f"the term of this one, {self.term}, is over"
                ) from None
            raise

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


def _final(job_id: str) -> str:
    return PREFIX + f"final:{job_id}"


def _log(job_id: str) -> str:
    return PREFIX + f"log:{job_id}"


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
