"""The Python client of a scheduler.

client = Client()
job_id = client.submit("job.yaml")
for job in client.watch(job_id):
    print(job.state, job.step, job.loss)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from chassis.closing import Closing
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
from heterps.client.transport import BLOCKING, Transport, iterate, run
from heterps.home.target import Target
from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec

if TYPE_CHECKING:
    from heterps.client.download import JobFiles
    from protos.decision_pb2 import Decision as DecisionMessage
    from protos.history_pb2 import JobHistory
    from scheduler import Decision
    from scheduler.problem.demands import Pin
    from scheduler.problem.inputs import ResourcesLike, WorkloadLike

R = TypeVar("R")


class Client(Closing):
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
        self._begin(Target.find(address, context))

    @classmethod
    def of(cls, target: Target) -> "Client":
        """A client of a scheduler that was found before."""
        made = cls.__new__(cls)
        made._begin(target)
        return made

    def _begin(self, target: Target) -> None:
        self.target = target
        self.address = target.address
        self._transport = Transport(target, BLOCKING)

    def submit(
        self,
        job: str | Path | JobSpec | None,
        job_id: str | None = None,
        overrides: Iterable[str] | Mapping[str, object] = (),
        on_line: Callable[[str], None] = lambda line: None,
        code: bool = True,
        on_left_out: Callable[[str], None] | None = None,
        resume: str | None = None,
    ) -> str:
        """Prepare the job's data, send its code and queue it; the job's id.

        Args:
            job: a job file, or a job from `load_job`, which is left as it is; None with `resume`
                for all as it was.
            job_id: submitting the same job under the same id again changes nothing.
            overrides: `a.b=value` texts, or a mapping of dotted key to value; for a file.
            on_line: called with each line that `data.prepare` prints, and what is left out.
            code: send the folder of the job file, or the one that its `code` names; without,
                nodes must find it at the same path.
            on_left_out: called instead of `on_line` with each line on what is left out.
            resume: JOB or JOB@STEP, a job that has ended: the new one goes on from that checkpoint,
                with the same model, data and code; a job that is given may have another plan.

        Raises:
            JobFileError, PrepareError, CodeError, OriginError: nothing was submitted.
        """
        return run(
            steps.submit(
                self._transport, job, job_id, overrides, on_line, code, on_left_out, resume
            )
        )

    def submit_prepared(self, job: JobSpec) -> str:
        """Queue a job that nodes can run as it is: data prepared, code where they look for it."""
        return run(self._transport.call(calls.submit(calls.new_id(job.name), job)))

    def status(self, job_id: str) -> Job:
        """How a job stands."""
        return run(self._transport.call(calls.status(job_id)))

    def checkpoints(self, job_id: str) -> list[Cut]:
        """The states of a job that are kept, from which it, or another, can go on; oldest first."""
        return run(steps.checkpoints(self._transport, job_id))

    def jobs(
        self,
        limit: int = 0,
        before: str = "",
        unended: bool = False,
        timeout: float = calls.CALL_S,
    ) -> list[Job]:
        """The latest jobs in the order of submission, fetched a page at a time.

        Args:
            limit: how many; 0 for all that are kept.
            before: a job's id, or a page's `next`: only those submitted before it.
            unended: only those that have not ended.
            timeout: seconds that the scheduler may take to answer.
        """
        return run(steps.jobs(self._transport, limit, before, unended, timeout))

    def jobs_page(self, limit: int = 0, before: str = "") -> JobsPage:
        """A page of jobs, with how many there are; arguments as of `jobs`, 0 for a whole page."""
        return run(self._transport.call(calls.jobs_page(limit, before, False, calls.CALL_S)))

    def find(self, prefix: str | None = None) -> str:
        """The id of the job that `prefix` begins, of the latest job for None.

        Raises:
            UnknownJobError: none or several begin so.
        """
        return run(steps.find(self._transport, prefix))

    def watch(self, job_id: str) -> Iterator[Job]:
        """How a job stands, now and after each change, to its end.

        Rides out a scheduler that is away for up to 30 s.
        """
        return iterate(steps.watch(self._transport, job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """Wait for a job's end.

        Rides out a scheduler that is away, as `watch` does.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
        """
        return run(steps.wait(self._transport, job_id, timeout))

    def get(self, job_id: str, to: str | Path | None = None) -> "JobFiles":
        """Fetch what a job that has ended left: model, metrics.json, decision.json.

        Args:
            job_id: of the job.
            to: a folder, new, empty or of an earlier `get`; by default one of the job's name.
                `heterps.load` opens it.

        Raises:
            FetchError: it has not ended, or the folder holds something else.
        """
        return run(steps.get(self._transport, job_id, to))

    def logs(self, job_id: str, follow: bool = False) -> Iterator[LogText]:
        """What the job's processes wrote; with `follow`, on to its end.

        One that follows rides out a scheduler that is away, as `watch` does.
        """
        return iterate(steps.logs(self._transport, job_id, follow))

    def cancel(self, job_id: str) -> Job:
        """Ask a job to end; safe to repeat, without effect once it has ended."""
        return run(self._transport.call(calls.cancel(job_id)))

    def move(self, job_id: str, plan: "str | Path | Mapping[str, object] | None" = None) -> Job:
        """Have a running job go over to another plan, and wait until it has.

        The last of its `moves` says how that went: with `failed` it goes on under the plan before.

        Args:
            job_id: of the job.
            plan: a file that `Decision.export` or `heterps plan --json` wrote, or its content; None
                for the best plan by what the run was measured to take.

        Raises:
            BestPlanError: it has the best plan already.
            HeterpsError: it does not train, or cannot have that plan.
            InputError: `plan` is none.
        """
        return run(steps.move(self._transport, job_id, plan))

    def decision(self, job_id: str) -> "Decision":
        """What was decided for a job, and why.

        Raises:
            NoDecisionError: nothing is decided yet, or nothing was.
        """
        return run(self._transport.call(calls.decision(job_id)))

    def decisions(self, limit: int = 0, before: str = "") -> list[JobDecision]:
        """The decisions of the latest `limit` jobs (0: of all) before one, the oldest first.

        They hold figures and stages; `decision` gives all of one.
        """
        return run(steps.decisions(self._transport, limit, before))

    def replan(self, job_id: str) -> pb.Replan:
        """What a job's run was measured to take so far, and the proposal that stands, if any."""
        return run(self._transport.call(calls.replan(job_id)))

    def history(self, job_id: str) -> "JobHistory":
        """The states that a job came to, and what its stages reported over time."""
        return run(self._transport.call(calls.history(job_id)))

    def plans(self, job_id: str) -> list[PlanUse]:
        """The plans that a job has trained under, each with what it was measured to come to."""
        return run(self._transport.call(calls.plans(job_id)))

    def nodes(self) -> list[Node]:
        """The nodes and standing shards that are alive."""
        return run(steps.nodes(self._transport))

    def drain(self, node_id: str, notice_s: float = 120.0) -> Node:
        """Have a node take nothing new and end once its jobs have left it; returns at once.

        Args:
            notice_s: seconds until it ends, whatever runs there.

        Raises:
            HeterpsError: there is no such node.
        """
        return run(self._transport.call(calls.drain(node_id, notice_s)))

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
        call = calls.plan(
            *(workload, resources, min_throughput, method, seed, pin, exclude),
            *(max_price_per_hour, finish_by, pareto, finetune),
        )
        return run(self._transport.call(call))

    def who(self) -> Identity:
        """Who we are to the scheduler: the user and role of our token."""
        return run(self._transport.call(calls.who()))

    def create_token(self, name: str, role: str, expires_s: float = 0.0) -> Token:
        """Make a token, with the cluster's own; its `secret` is told this once.

        Args:
            name: the user of the jobs that are submitted with it; unique.
            role: read, submit or operate.
            expires_s: how long it is good for; 0 for ever.
        """
        return run(self._transport.call(calls.create_token(name, role, expires_s)))

    def tokens(self) -> list[Token]:
        """The tokens by name, without their secrets."""
        return run(self._transport.call(calls.tokens()))

    def revoke_token(self, name: str) -> bool:
        """Make a token open nothing from now on; False when there is none of that name.

        Streams that it holds open end within seconds; its user's jobs run on.
        """
        return run(self._transport.call(calls.revoke_token(name)))

    def ping(self) -> None:
        """Check that a scheduler answers."""
        self.nodes()

    def status_message(self, job_id: str) -> pb.JobStatus:
        """The message behind `status`, with what was submitted."""
        return run(self._transport.call(calls.status_message(job_id)))

    def decision_message(self, job_id: str) -> "DecisionMessage":
        """The message behind `decision`."""
        return run(self._transport.call(calls.decision_message(job_id)))

    def close(self) -> None:
        """Close the connection."""
        self._transport.channel.close()
