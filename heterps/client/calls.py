"""What a client asks a scheduler, and how it reads the answers: no network in here.

`Client` and `AsyncClient` make the same calls, one with threads, one with coroutines.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from chassis.channels import RpcError, status_of
from chassis.near import nearest
from chassis.refusal import reason_of
from heterps.client.records import Identity, Job, JobDecision, JobsPage, Node, PlanUse, Token
from heterps.errors import (
    BestPlanError,
    ForbiddenError,
    HeterpsError,
    MissingCodeError,
    NoDecisionError,
    TokenRefusedError,
    UnknownJobError,
    UnreachableError,
)
from heterps.home.target import Target
from protos import access_pb2 as access_pb
from protos import artifacts_pb2 as files_pb
from protos import scheduler_pb2 as pb
from protos.history_pb2 import JobHistory
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import CODE_MISSING, HAS_BEST_PLAN, NO_DECISION, STORE_UNREACHABLE

if TYPE_CHECKING:
    from protos.decision_pb2 import Decision as DecisionMessage
    from scheduler import Decision
    from scheduler.problem.demands import Pin
    from scheduler.problem.inputs import ResourcesLike, WorkloadLike

R = TypeVar("R")
CALL_S = 10.0
_CANCEL_S = 30.0  # it answers when the job's processes are stopped
_PLAN_S = 600.0
_SUBMIT_RETRY_S = 5.0
_CANCEL_RETRY_S = 10.0  # for a Redis that is away for a moment, too
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One call.

    Attributes:
        method: of the Scheduler service, or of Access, Artifacts or History with that in front.
        request: its message.
        what: the purpose, for errors.
        read: the answer from the reply.
        job_id: the job that it is about, if any.
        timeout_s: for the answer.
        retry_s: for which nobody may be there; more than 0 where repeating is harmless.
    """

    method: str
    request: Message
    what: str
    read: Callable[[Any], R]
    job_id: str = ""
    timeout_s: float = CALL_S
    retry_s: float = 0.0


def submit(job_id: str, job: JobSpec) -> Call[str]:
    """Queue a job whose data and code are where they must be; its id."""
    request = pb.SubmitRequest(job_id=job_id, job=job)
    return Call(
        "Submit", request, f"submit {job.name}", lambda r: str(r.job_id), retry_s=_SUBMIT_RETRY_S
    )


def code_limit() -> Call[int]:
    """How many bytes of code a job may have; also whether a scheduler answers."""
    request = files_pb.HasRequest()
    return Call("Artifacts.Has", request, "ask what it takes", lambda r: int(r.code_limit))


def files(job_id: str) -> Call[list[files_pb.Artifact]]:
    """The files that are kept of a job."""
    request = files_pb.ListArtifactsRequest(job_id=job_id)
    return Call("Artifacts.List", request, f"files of {job_id}", lambda r: list(r.files))


def status_message(job_id: str) -> Call[pb.JobStatus]:
    """How a job stands, with what was submitted."""
    return Call("GetJob", pb.JobRequest(job_id=job_id), f"job {job_id}", lambda r: r, job_id)


def status(job_id: str) -> Call[Job]:
    """How a job stands."""
    return Call("GetJob", pb.JobRequest(job_id=job_id), f"job {job_id}", Job.of, job_id)


def jobs_page(limit: int, before: str, unended: bool, timeout_s: float) -> Call[JobsPage]:
    """A page of jobs."""
    request = pb.ListJobsRequest(limit=limit, before=before, unended=unended)
    return Call("ListJobs", request, "list jobs", JobsPage.of, timeout_s=timeout_s)


def cancel(job_id: str) -> Call[Job]:
    """Ask a job to end."""
    request = pb.JobRequest(job_id=job_id)
    what = f"cancel {job_id}"
    return Call("CancelJob", request, what, Job.of, job_id, _CANCEL_S, _CANCEL_RETRY_S)


def move(job_id: str, plan: "DecisionMessage | None") -> Call[Job]:
    """Ask a job to go over to another plan; None: the best by what was measured."""
    request = pb.MoveJobRequest(job_id=job_id, decision=plan)
    return Call("MoveJob", request, f"move {job_id}", Job.of, job_id)


def decision_message(job_id: str) -> "Call[DecisionMessage]":
    """What was decided for a job."""
    request = pb.JobRequest(job_id=job_id)
    return Call("GetDecision", request, f"decision of {job_id}", lambda r: r, job_id)


def decision(job_id: str) -> "Call[Decision]":
    """What was decided for a job, and why."""
    from scheduler import Decision

    request = pb.JobRequest(job_id=job_id)
    what = f"decision of {job_id}"
    return Call("GetDecision", request, what, Decision.from_message, job_id)


def decisions(limit: int, before: str) -> Call[tuple[list[JobDecision], str]]:
    """The decisions of a page of jobs, and what the page of older ones is before."""
    from scheduler import Decision

    def read(reply: pb.ListDecisionsReply) -> tuple[list[JobDecision], str]:
        found = [
            JobDecision(
                one.job_id, one.job_name, one.submitted_at, Decision.from_message(one.decision)
            )
            for one in reply.decisions
        ]
        return found, reply.next

    request = pb.ListDecisionsRequest(limit=limit, before=before)
    return Call("ListDecisions", request, "list decisions", read)


def replan(job_id: str) -> Call[pb.Replan]:
    """What a job's run was measured to take so far."""
    return Call("GetReplan", pb.JobRequest(job_id=job_id), f"replan {job_id}", lambda r: r, job_id)


def history(job_id: str) -> Call[JobHistory]:
    """The states that a job came to, and what its stages reported over time."""
    request = pb.JobRequest(job_id=job_id)
    return Call("History.GetHistory", request, f"history of {job_id}", lambda r: r, job_id)


def plans(job_id: str) -> Call[list[PlanUse]]:
    """The plans that a job has trained under."""
    request = pb.JobRequest(job_id=job_id)

    def read(reply: JobHistory) -> list[PlanUse]:
        return [PlanUse.of(one) for one in reply.plans]

    return Call("History.GetHistory", request, f"plans of {job_id}", read, job_id)


def who() -> Call[Identity]:
    """Who the caller is to the scheduler."""
    return Call("Access.WhoAmI", access_pb.WhoAmIRequest(), "ask who we are", Identity.of)


def create_token(name: str, role: str, expires_s: float) -> Call[Token]:
    """Make a token."""
    request = access_pb.CreateTokenRequest(name=name, role=role, expires_s=expires_s)

    def read(reply: access_pb.CreateTokenReply) -> Token:
        return Token.of(reply.token, reply.secret)

    return Call("Access.CreateToken", request, f"create token {name}", read)


def tokens() -> Call[list[Token]]:
    """The tokens by name."""

    def read(reply: access_pb.ListTokensReply) -> list[Token]:
        return [Token.of(one) for one in reply.tokens]

    return Call("Access.ListTokens", access_pb.ListTokensRequest(), "list tokens", read)


def revoke_token(name: str) -> Call[bool]:
    """Make a token open nothing from now on."""
    request = access_pb.RevokeTokenRequest(name=name)
    what = f"revoke token {name}"
    return Call("Access.RevokeToken", request, what, lambda r: bool(r.revoked))


def nodes(after: str) -> Call[tuple[list[Node], str]]:
    """A page of the nodes and standing shards that are alive, and where the next one begins."""

    def read(reply: pb.ListNodesReply) -> tuple[list[Node], str]:
        return [Node.of(status) for status in reply.nodes], str(reply.next)

    return Call("ListNodes", pb.ListNodesRequest(after=after), "list nodes", read)


def drain(node_id: str, notice_s: float) -> Call[Node]:
    """Ask a node to end once its jobs have left it."""
    request = pb.DrainNodeRequest(node_id=node_id, notice_s=notice_s)
    return Call("DrainNode", request, f"drain {node_id}", Node.of)


def plan(
    workload: "WorkloadLike | str | Path",
    resources: "ResourcesLike | str | Path",
    min_throughput: float | None,
    method: str,
    seed: int,
    pin: "Pin",
    exclude: Sequence[str],
    max_price_per_hour: float | None,
    finish_by: float | str | None,
    pareto: bool,
    finetune: float,
) -> "Call[Decision]":
    """A plan, made on the scheduler's machine.

    Raises:
        InputError: an argument that cannot be used.
    """
    from heterps.job.resources import load_resources
    from scheduler import Decision, load_workload
    from scheduler.problem.demands import Demands
    from scheduler.problem.inputs import as_resources, as_workload

    if isinstance(workload, str | Path):
        workload = load_workload(workload)
    if isinstance(resources, str | Path):
        resources = load_resources(resources)
    workload = as_workload(workload)
    demands = Demands.check(workload, min_throughput, max_price_per_hour, finish_by, pin, exclude)
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
    return Call("Plan", request, "plan", Decision.from_message, timeout_s=_PLAN_S + finetune)


def broken(target: Target, what: str, job_id: str, error: grpc.RpcError) -> HeterpsError:
    """A stream's failure in words.

    Args:
        what: it was opened for.
    """
    named = f"scheduler {target.address}: {what} {job_id}"
    told = RpcError(named, *status_of(error), reason_of(error))
    return explain(target, told, job_id)


def explain(target: Target, error: RpcError, job_id: str = "") -> HeterpsError:
    """A call's failure in words, with what to type next."""
    if error.reason == STORE_UNREACHABLE:
        return UnreachableError(
            f"the scheduler at {target.address} answers, but not its Redis: {error.details}\n"
            "See what runs with `heterps status`."
        )
    if error.code in _AWAY:
        return UnreachableError(
            f"no scheduler answers at {target}: {error.details}.{target.tls_hint}\n"
            f"{target.away_hint}"
        )
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return TokenRefusedError(
            f"the scheduler at {target} refuses us: {error.details}.\n{target.refused_hint}"
        )
    if error.code is grpc.StatusCode.PERMISSION_DENIED:
        return ForbiddenError(
            f"the scheduler at {target} forbids it: {error.details}.\n"
            "Ask whoever runs the cluster for a token that may: `heterps token create --help`."
        )
    if error.reason == CODE_MISSING:
        return MissingCodeError(error.details)
    if error.reason == NO_DECISION:
        hint = f"\nSee how it stands with `heterps inspect {job_id}`." if job_id else ""
        return NoDecisionError(error.details + hint)
    if error.reason == HAS_BEST_PLAN:
        return BestPlanError(error.details)
    if error.code is grpc.StatusCode.NOT_FOUND and job_id:
        return UnknownJobError(f"{error.details}\nSee all jobs with `heterps jobs`.")
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return HeterpsError(
            f"{error}: the scheduler is of another version than this client (`heterps --version`)"
        )
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
        raise UnknownJobError(
            f"job {prefix!r}: several begin so: {shown}; expected more letters. "
            "See all jobs with `heterps jobs`."
        )
    near = nearest(prefix, ids)
    hint = f"did you mean {near}? " if near else ""
    raise UnknownJobError(f"job {prefix!r}: unknown; {hint}See all jobs with `heterps jobs`.")
