"""The Python client of a scheduler.

client = Client()
job_id = client.submit("job.yaml")
for job in client.watch(job_id):
    print(job.state, job.step, job.loss)
"""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from heterps.errors import HeterpsError, NoDecisionError, UnknownJobError, UnreachableError
from heterps.jobfile import load_job
from heterps.prepare import prepare
from heterps.records import Job, KeptDecision, LogText, Node
from heterps.schema import nearest
from heterps.target import Target
from protos import scheduler_pb2 as pb
from protos.channels import RpcError, call, connect, status_of
from protos.history_pb2_grpc import HistoryStub
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2_grpc import SchedulerStub

if TYPE_CHECKING:
    from protos.decision_pb2 import Decision as DecisionMessage
    from protos.history_pb2 import JobHistory
    from scheduler import Decision
    from scheduler.demands import Pin
    from scheduler.inputs import ResourcesLike, WorkloadLike

R = TypeVar("R")
_CALL_S = 10.0
_CANCEL_S = 30.0  # it answers when the job's processes are stopped
_PLAN_S = 600.0
_RECONNECT_S = 30.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Client:
    """Submits jobs to a scheduler and follows them.

    Args:
        address: host:port of the scheduler.
        context: the name of one, see `heterps context`. With neither: $HETERPS_CONTEXT, else
            $HETERPS_SCHEDULER, else the current context, else the cluster that `heterps up`
            started.

    Raises:
        ContextError: there is no such context, or it cannot be used.
        UnreachableError: no address is known; and from every method, when nothing answers.
    """

    def __init__(self, address: str | None = None, context: str | None = None) -> None:
        self.target = Target.find(address, context)
        self.address = self.target.address
        self._channel = connect(self.address, self.target.security())
        self._stub = SchedulerStub(self._channel)
        self._histories = HistoryStub(self._channel)

    def submit(
        self,
        job: str | Path | JobSpec,
        job_id: str | None = None,
        overrides: Iterable[str] | Mapping[str, object] = (),
        on_line: Callable[[str], None] = lambda line: None,
    ) -> str:
        """Prepare the job's data and queue it; the job's id.

        Args:
            job: a job file, or a job from `load_job`.
            job_id: submitting the same job under the same id again changes nothing.
            overrides: `a.b=value` texts, or a mapping of dotted key to value; for a file.
            on_line: called with each line that `data.prepare` prints.

        Raises:
            JobFileError, PrepareError: nothing was submitted.
        """
        spec = job if isinstance(job, JobSpec) else load_job(job, overrides)
        self.ping()  # before minutes of preparing for nobody
        prepare(spec, on_line)
        request = pb.SubmitRequest(job_id=job_id or new_id(spec.name), job=spec)
        return self._call(self._stub.Submit, request, f"submit {spec.name}", retry_s=5.0).job_id

    def status(self, job_id: str) -> Job:
        """How a job stands."""
        return Job.of(self.status_message(job_id))

    def jobs(self, timeout: float = _CALL_S) -> list[Job]:
        """All jobs in the order of submission.

        Args:
            timeout: seconds that the scheduler may take to answer.
        """
        request = pb.ListJobsRequest()
        reply = self._call(self._stub.ListJobs, request, "list jobs", timeout_s=timeout)
        return [Job.of(status) for status in reply.jobs]

    def find(self, prefix: str | None = None) -> str:
        """The id of the job that `prefix` begins, of the latest job for None.

        Raises:
            UnknownJobError: none or several begin so.
        """
        return match(prefix, [job.job_id for job in self.jobs()])

    def watch(self, job_id: str) -> Iterator[Job]:
        """How a job stands, now and after each change, to its end.

        Rides out a scheduler that is away for up to 30 s.
        """
        last_answer = time.monotonic()
        while True:
            try:
                for status in self._stub.WatchJob(pb.JobRequest(job_id=job_id)):
                    last_answer = time.monotonic()
                    job = Job.of(status)
                    yield job
                    if job.state.is_final:
                        return
            except grpc.RpcError as error:
                code, details = status_of(error)
                away_s = time.monotonic() - last_answer
                if code not in _AWAY or away_s > _RECONNECT_S:
                    failure = RpcError(f"scheduler {self.address}: watch {job_id}", code, details)
                    raise self._explain(failure, job_id) from None
            time.sleep(0.5)

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """Wait for a job's end.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (job := self.status(job_id)).state.is_final:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id}: still {job.state} after {timeout:g} s")
            time.sleep(0.2)
        return job

    def logs(self, job_id: str, follow: bool = False) -> Iterator[LogText]:
        """What the job's processes wrote; with `follow`, on to its end."""
        try:
            for chunk in self._stub.Logs(pb.LogsRequest(job_id=job_id, follow=follow)):
                yield LogText(chunk.process, chunk.text)
        except grpc.RpcError as error:
            failure = RpcError(f"scheduler {self.address}: logs {job_id}", *status_of(error))
            raise self._explain(failure, job_id) from None

    def cancel(self, job_id: str) -> Job:
        """Ask a job to end; safe to repeat, without effect once it has ended."""
        request = pb.JobRequest(job_id=job_id)
        what = f"cancel {job_id}"
        method = self._stub.CancelJob
        return Job.of(self._call(method, request, what, job_id=job_id, timeout_s=_CANCEL_S))

    def decision(self, job_id: str) -> "Decision":
        """What was decided for a job, and why.

        Raises:
            NoDecisionError: nothing is decided yet, or nothing was.
        """
        from scheduler import Decision

        return Decision.from_message(self.decision_message(job_id))

    def decisions(self, limit: int = 0) -> list[KeptDecision]:
        """The decisions of the latest `limit` jobs (0: of all), the oldest first.

        They hold figures and stages; `decision` gives all of one.
        """
        from scheduler import Decision

        request = pb.ListDecisionsRequest(limit=limit)
        reply = self._call(self._stub.ListDecisions, request, "list decisions")
        return [
            KeptDecision(
                one.job_id, one.job_name, one.submitted_at, Decision.from_message(one.decision)
            )
            for one in reply.decisions
        ]

    def replan(self, job_id: str) -> pb.Replan:
        """What a job's run was measured to take so far, and the proposal that stands, if any."""
        request = pb.JobRequest(job_id=job_id)
        return self._call(self._stub.GetReplan, request, f"replan {job_id}", job_id=job_id)

    def history(self, job_id: str) -> "JobHistory":
        """The states that a job came to, and what its stages reported over time."""
        request = pb.JobRequest(job_id=job_id)
        return self._call(
            self._histories.GetHistory, request, f"history of {job_id}", job_id=job_id
        )

    def nodes(self) -> list[Node]:
        """The nodes and standing shards that are alive."""
        reply = self._call(self._stub.ListNodes, pb.ListNodesRequest(), "list nodes")
        return [Node.of(status) for status in reply.nodes]

    def plan(
        self,
        workload: "WorkloadLike | str | Path",
        resources: "ResourcesLike | str | Path",
        min_throughput: float | None = None,
        method: str = "ppo",
        seed: int = 0,
        pin: "Pin" = None,
        *,
        exclude: Sequence[str] = (),
        max_price_per_hour: float | None = None,
        finish_by: float | str | None = None,
        pareto: bool = False,
        finetune: float = 0.0,
    ) -> "Decision":
        """Plan on the scheduler's machine, without running anything.

        Args:
            workload, resources: files, parsed files, or messages.
            min_throughput, method, seed, pin, exclude, max_price_per_hour, finish_by, pareto,
                finetune: as of `scheduler.plan`.

        Raises:
            InputError: an argument that cannot be used; nothing was asked.
        """
        from heterps.resources import load_resources
        from scheduler import Decision, load_workload
        from scheduler.demands import Demands
        from scheduler.inputs import as_resources, as_workload

        if isinstance(workload, str | Path):
            workload = load_workload(workload)
        if isinstance(resources, str | Path):
            resources = load_resources(resources)
        workload = as_workload(workload)
        demands = Demands.check(
            workload, min_throughput, max_price_per_hour, finish_by, pin, exclude
        )
        request = pb.PlanRequest(
            workload=workload.to_message(),
            resources=as_resources(resources).to_message(),
            min_throughput=min_throughput or 0.0,
            method=method,
            seed=seed,
            max_price_per_hour=demands.cap,
            finish_by_hours=demands.finish_by,
            exclude=demands.excluded,
            pin=demands.pin,
            pareto=pareto,
            finetune_s=finetune,
        )
        reply = self._call(self._stub.Plan, request, "plan", timeout_s=_PLAN_S + finetune)
        return Decision.from_message(reply)

    def ping(self) -> None:
        """Check that a scheduler answers."""
        self.nodes()

    def status_message(self, job_id: str) -> pb.JobStatus:
        """The message behind `status`, with what was submitted."""
        request = pb.JobRequest(job_id=job_id)
        return self._call(self._stub.GetJob, request, f"job {job_id}", job_id=job_id)

    def decision_message(self, job_id: str) -> "DecisionMessage":
        """The message behind `decision`."""
        request = pb.JobRequest(job_id=job_id)
        return self._call(self._stub.GetDecision, request, f"decision of {job_id}", job_id=job_id)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self,
        method: Callable[..., R],
        request: Any,
        what: str,
        *,
        job_id: str = "",
        timeout_s: float = _CALL_S,
        retry_s: float = 0.0,
    ) -> R:
        what = f"scheduler {self.address}: {what}"
        try:
            return call(method, request, what=what, timeout_s=timeout_s, retry_s=retry_s)
        except RpcError as error:
            raise self._explain(error, job_id) from None

    def _explain(self, error: RpcError, job_id: str) -> HeterpsError:
        """The failure in words, with what to type next."""
        if error.code in _AWAY and error.details.startswith("redis "):
            return UnreachableError(
                f"the scheduler at {self.address} answers, but not its Redis: {error.details}"
            )
        if error.code in _AWAY:
            return UnreachableError(
                f"no scheduler answers at {self.target}: {error.details}.{self.target.tls_hint}\n"
                f"{self.target.away_hint}"
            )
        if error.code is grpc.StatusCode.UNAUTHENTICATED:
            return HeterpsError(
                f"the scheduler at {self.target} refuses us: {error.details}.\n"
                f"{self.target.refused_hint}"
            )
        if error.code is grpc.StatusCode.NOT_FOUND and "no decision" in error.details:
            return NoDecisionError(error.details)
        if error.code is grpc.StatusCode.NOT_FOUND and job_id:
            return UnknownJobError(f"{error.details}\nSee all jobs with `heterps jobs`.")
        if error.code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            return HeterpsError(str(error))
        return HeterpsError(error.details or str(error))


def new_id(name: str) -> str:
    """A fresh job id that begins with the job's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
    return f"{stem or 'job'}-{secrets.token_hex(3)}"


def match(prefix: str | None, ids: list[str]) -> str:
    """The one of `ids`, oldest first, that `prefix` begins; the last one for None.

    Raises:
        UnknownJobError: none or several begin so.
    """
    if not ids:
        raise UnknownJobError("there are no jobs yet; submit one with `heterps submit JOB.yaml`")
    if prefix is None:
        return ids[-1]
    found = [one for one in ids if one == prefix] or [one for one in ids if one.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[-5:])
        raise UnknownJobError(f"job {prefix!r}: several begin so: {shown}; expected more letters")
    near = nearest(prefix, ids)
    hint = f"did you mean {near}? " if near else ""
    raise UnknownJobError(f"job {prefix!r}: unknown; {hint}See all jobs with `heterps jobs`.")
