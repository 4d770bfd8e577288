"""The Python client for coroutines, with the same verbs as `heterps.Client`.

async with AsyncClient() as client:
    job_id = await client.submit("job.yaml")
    async for job in client.watch(job_id):
        print(job.state, job.step, job.loss)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from chassis.channels import RpcError, call_async, connect_async
from chassis.transfer import TransferError, fetch_async, send_async
from heterps.client import calls, steps
from heterps.client.calls import Call
from heterps.client.records import Job, JobDecision, LogText, Node
from heterps.client.retry import Retry
from heterps.errors import FetchError
from heterps.home.target import Target
from protos import scheduler_pb2 as pb
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.history_pb2 import JobHistory
from protos.history_pb2_grpc import HistoryStub
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2_grpc import SchedulerStub

if TYPE_CHECKING:
    from heterps.client.download import JobFiles
    from protos.decision_pb2 import Decision as DecisionMessage
    from scheduler import Decision
    from scheduler.problem.demands import Pin
    from scheduler.problem.inputs import ResourcesLike, WorkloadLike

R = TypeVar("R")


class AsyncClient:
    """Submits jobs to a scheduler and follows them, from coroutines.

    What takes this machine a while, such as packing code, runs on a thread. Arguments, results
    and errors are those of `heterps.Client`. Make one where the event loop runs.
    """

    def __init__(self, address: str | None = None, context: str | None = None) -> None:
        self.target = Target.find(address, context)
        self.address = self.target.address
        self._channel = connect_async(self.address, self.target.security())
        # The generated stubs serve both kinds of channel.
        self._stub: Any = SchedulerStub(self._channel)
        self._artifacts: Any = ArtifactsStub(self._channel)
        self._services: dict[str, Any] = {
            "": self._stub,
            "Artifacts": self._artifacts,
            "History": HistoryStub(self._channel),
        }

    async def submit(
        self,
        job: str | Path | JobSpec,
        job_id: str | None = None,
        overrides: Iterable[str] | Mapping[str, object] = (),
        on_line: Callable[[str], None] = lambda line: None,
        code: bool = True,
    ) -> str:
        """Prepare the job's data, send its code and queue it; see `Client.submit`."""
        return await self._run(steps.submit(job, job_id, overrides, on_line, code))

    async def status(self, job_id: str) -> Job:
        """How a job stands."""
        return await self._ask(calls.status(job_id))

    async def jobs(self, timeout: float = calls.CALL_S) -> list[Job]:
        """All jobs in the order of submission."""
        return await self._ask(calls.jobs(timeout))

    async def find(self, prefix: str | None = None) -> str:
        """The id of the job that `prefix` begins, of the latest job for None."""
        return await self._run(steps.find(prefix))

    async def watch(self, job_id: str) -> AsyncIterator[Job]:
        """How a job stands, now and after each change, to its end; see `Client.watch`."""
        request = pb.JobRequest(job_id=job_id)
        replies = self._follow(self._stub.WatchJob, lambda: request, "watch", job_id, Retry())
        async for status in replies:
            job = Job.of(status)
            yield job
            if job.state.is_final:
                return

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """Wait for a job's end; see `Client.wait`."""
        return await self._run(steps.wait(job_id, timeout))

    async def get(self, job_id: str, to: str | Path | None = None) -> "JobFiles":
        """Fetch what a job that has ended left; see `Client.get`."""
        return await self._run(steps.get(job_id, to))

    async def logs(self, job_id: str, follow: bool = False) -> AsyncIterator[LogText]:
        """What the job's processes wrote; with `follow`, on to its end; see `Client.logs`."""
        offsets: dict[str, int] = {}

        def request() -> pb.LogsRequest:
            return pb.LogsRequest(job_id=job_id, follow=follow, offsets=offsets)

        retry = Retry() if follow else Retry(0.0)
        async for chunk in self._follow(self._stub.Logs, request, "logs", job_id, retry):
            offsets[chunk.process] = chunk.next_offset
            yield LogText(chunk.process, chunk.text)

    async def cancel(self, job_id: str) -> Job:
        """Ask a job to end; safe to repeat, without effect once it has ended."""
        return await self._ask(calls.cancel(job_id))

    async def decision(self, job_id: str) -> "Decision":
        """What was decided for a job, and why."""
        return await self._ask(calls.decision(job_id))

    async def decisions(self, limit: int = 0) -> list[JobDecision]:
        """The decisions of the latest `limit` jobs (0: of all), the oldest first."""
        return await self._ask(calls.decisions(limit))

    async def replan(self, job_id: str) -> pb.Replan:
        """What a job's run was measured to take so far, and the proposal that stands, if any."""
        return await self._ask(calls.replan(job_id))

    async def history(self, job_id: str) -> JobHistory:
        """The states that a job came to, and what its stages reported over time."""
        return await self._ask(calls.history(job_id))

    async def nodes(self) -> list[Node]:
        """The nodes and standing shards that are alive."""
        return await self._ask(calls.nodes())

    async def plan(
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
        """Plan on the scheduler's machine, without running anything; see `Client.plan`."""
        ask = calls.plan(
            *(workload, resources, min_throughput, method, seed, pin, exclude),
            *(max_price_per_hour, finish_by, pareto, finetune),
        )
        return await self._ask(ask)

    async def ping(self) -> None:
        """Check that a scheduler answers."""
        await self.nodes()

    async def status_message(self, job_id: str) -> pb.JobStatus:
        """The message behind `status`, with what was submitted."""
        return await self._ask(calls.status_message(job_id))

    async def decision_message(self, job_id: str) -> "DecisionMessage":
        """The message behind `decision`."""
        return await self._ask(calls.decision_message(job_id))

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _follow(
        self,
        method: Callable[[Any], AsyncIterator[Any]],
        request: Callable[[], Message],
        what: str,
        job_id: str,
        retry: Retry,
    ) -> AsyncIterator[Any]:
        """What comes on a stream; where it breaks off, it is opened again."""
        while True:
            try:
                async for reply in method(request()):
                    retry.succeeded()
                    yield reply
                return
            except grpc.RpcError as error:
                retry.failed(calls.broken(self.target, what, job_id, error))
            await self._run(steps.await_return(job_id, retry))

    async def _run(self, procedure: steps.Steps[R]) -> R:
        return await steps.run_async(procedure, self._perform)

    async def _perform(self, step: steps.Step) -> Any:
        if isinstance(step, Call):
            return await self._ask(step)
        if isinstance(step, steps.Work):
            return await asyncio.to_thread(step.action)
        if isinstance(step, steps.Pause):
            return await asyncio.sleep(step.seconds)
        what = f"scheduler {self.address}: {step.what}"
        try:
            if isinstance(step, steps.Send):
                return await send_async(self._artifacts, step.content, what=what)
            return await fetch_async(
                self._artifacts, step.request, step.path, what=what, most_bytes=step.most_bytes
            )
        except TransferError as error:
            raise FetchError(str(error)) from None
        except RpcError as error:
            raise calls.explain(self.target, error) from None

    async def _ask(self, ask: Call[R]) -> R:
        service, _, method = ask.method.rpartition(".")
        try:
            reply = await call_async(
                getattr(self._services[service], method),
                ask.request,
                what=f"scheduler {self.address}: {ask.what}",
                timeout_s=ask.timeout_s,
                retry_s=ask.retry_s,
            )
        except RpcError as error:
            raise calls.explain(self.target, error, ask.job_id) from None
        return ask.read(reply)
