"""The Python client for coroutines, with the same verbs as `heterps.Client`.

async with AsyncClient() as client:
    job_id = await client.submit("job.yaml")
    async for job in client.watch(job_id):
        print(job.state, job.step, job.loss)
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from heterps.client import calls, steps
from heterps.client.records import (
    Cut,
    Identity,
    Job,
    JobDecision,
    JobsPage,
    LogText,
    Node,
    PlanUse,
    Token,
)
from heterps.client.transport import ASYNC, Transport
from heterps.home.target import Target
from protos import scheduler_pb2 as pb
from protos.history_pb2 import JobHistory
from protos.job_pb2 import JobSpec

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
        self._transport = Transport(self.target, ASYNC)

    async def submit(
        self,
        job: str | Path | JobSpec | None,
        job_id: str | None = None,
        overrides: Iterable[str] | Mapping[str, object] = (),
        on_line: Callable[[str], None] = lambda line: None,
        code: bool = True,
        on_left_out: Callable[[str], None] | None = None,
        resume: str | None = None,
    ) -> str:
        """Prepare the job's data, send its code and queue it; see `Client.submit`."""
        return await steps.submit(
            self._transport, job, job_id, overrides, on_line, code, on_left_out, resume
        )

    async def status(self, job_id: str) -> Job:
        """How a job stands."""
        return await self._transport.call(calls.status(job_id))

    async def checkpoints(self, job_id: str) -> list[Cut]:
        """The states of a job that are kept, from which it, or another, can go on; oldest first."""
        return await steps.checkpoints(self._transport, job_id)

    async def jobs(
        self,
        limit: int = 0,
        before: str = "",
        unended: bool = False,
        timeout: float = calls.CALL_S,
    ) -> list[Job]:
        """The latest jobs in the order of submission; see `Client.jobs`."""
        return await steps.jobs(self._transport, limit, before, unended, timeout)

    async def jobs_page(self, limit: int = 0, before: str = "") -> JobsPage:
        """A page of jobs, with how many there are; see `Client.jobs_page`."""
        return await self._transport.call(calls.jobs_page(limit, before, False, calls.CALL_S))

    async def find(self, prefix: str | None = None) -> str:
        """The id of the job that `prefix` begins, of the latest job for None."""
        return await steps.find(self._transport, prefix)

    def watch(self, job_id: str) -> AsyncIterator[Job]:
        """How a job stands, now and after each change, to its end; see `Client.watch`."""
        return steps.watch(self._transport, job_id)

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """Wait for a job's end; see `Client.wait`."""
        return await steps.wait(self._transport, job_id, timeout)

    async def get(self, job_id: str, to: str | Path | None = None) -> "JobFiles":
        """Fetch what a job that has ended left; see `Client.get`."""
        return await steps.get(self._transport, job_id, to)

    def logs(self, job_id: str, follow: bool = False) -> AsyncIterator[LogText]:
        """What the job's processes wrote; with `follow`, on to its end; see `Client.logs`."""
        return steps.logs(self._transport, job_id, follow)

    async def move(
        self, job_id: str, plan: "str | Path | Mapping[str, object] | None" = None
    ) -> Job:
        """As `Client.move`."""
        return await steps.move(self._transport, job_id, plan)

    async def cancel(self, job_id: str) -> Job:
        """Ask a job to end; safe to repeat, without effect once it has ended."""
        return await self._transport.call(calls.cancel(job_id))

    async def decision(self, job_id: str) -> "Decision":
        """What was decided for a job, and why."""
        return await self._transport.call(calls.decision(job_id))

    async def decisions(self, limit: int = 0, before: str = "") -> list[JobDecision]:
        """The decisions of the latest `limit` jobs (0: of all) before one, the oldest first."""
        return await steps.decisions(self._transport, limit, before)

    async def replan(self, job_id: str) -> pb.Replan:
        """What a job's run was measured to take so far, and the proposal that stands, if any."""
        return await self._transport.call(calls.replan(job_id))

    async def history(self, job_id: str) -> JobHistory:
        """The states that a job came to, and what its stages reported over time."""
        return await self._transport.call(calls.history(job_id))

    async def plans(self, job_id: str) -> list[PlanUse]:
        """The plans that a job has trained under, each with what it was measured to come to."""
        return await self._transport.call(calls.plans(job_id))

    async def nodes(self) -> list[Node]:
        """The nodes and standing shards that are alive."""
        return await steps.nodes(self._transport)

    async def drain(self, node_id: str, notice_s: float = 120.0) -> Node:
        """As `Client.drain`."""
        return await self._transport.call(calls.drain(node_id, notice_s))

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
        call = calls.plan(
            *(workload, resources, min_throughput, method, seed, pin, exclude),
            *(max_price_per_hour, finish_by, pareto, finetune),
        )
        return await self._transport.call(call)

    async def who(self) -> Identity:
        """Who we are to the scheduler: the user and role of our token."""
        return await self._transport.call(calls.who())

    async def create_token(self, name: str, role: str, expires_s: float = 0.0) -> Token:
        """Make a token; see `Client.create_token`."""
        return await self._transport.call(calls.create_token(name, role, expires_s))

    async def tokens(self) -> list[Token]:
        """The tokens by name, without their secrets."""
        return await self._transport.call(calls.tokens())

    async def revoke_token(self, name: str) -> bool:
        """Make a token open nothing from now on; see `Client.revoke_token`."""
        return await self._transport.call(calls.revoke_token(name))

    async def ping(self) -> None:
        """Check that a scheduler answers."""
        await self.nodes()

    async def status_message(self, job_id: str) -> pb.JobStatus:
        """The message behind `status`, with what was submitted."""
        return await self._transport.call(calls.status_message(job_id))

    async def decision_message(self, job_id: str) -> "DecisionMessage":
        """The message behind `decision`."""
        return await self._transport.call(calls.decision_message(job_id))

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
