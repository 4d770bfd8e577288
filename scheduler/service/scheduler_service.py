"""The methods of the gRPC service Scheduler."""

import math
import re
import threading
import uuid
from collections.abc import Iterator
from typing import NoReturn

import grpc

from chassis.refusal import refuse
from chassis.roles import Role
from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.naming import MOST_SHARDS
from protos.node_pb2 import DrainRequest
from protos.reason_pb2 import CODE_MISSING, HAS_BEST_PLAN, NO_DECISION, STORE_UNREACHABLE
from protos.scheduler_pb2 import (
    END_CANCELLED,
    DrainNodeRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JobDecision,
    JobRequest,
    JobStatus,
    ListDecisionsReply,
    ListDecisionsRequest,
    ListJobsReply,
    ListJobsRequest,
    ListNodesReply,
    ListNodesRequest,
    LogChunk,
    LogsRequest,
    MoveJobRequest,
    NodeStatus,
    PlanRequest,
    ProgressReport,
    Replan,
    ReportReply,
    SubmitReply,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerServicer
from scheduler.methods.names import DEFAULT
from scheduler.problem.fields import InputError
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, Interrupted, call
from scheduler.runs.change import BestPlanError, ChangeRefusedError, PlanChange
from scheduler.runs.changes import under_way
from scheduler.runs.context import Context
from scheduler.runs.dispatcher import Dispatcher
from scheduler.runs.logs import stream
from scheduler.runs.offer import OfferError
from scheduler.runs.plans import in_brief
from scheduler.service.access import Access
from scheduler.service.artifacts import CODE_NAME, Artifacts, MissingError
from scheduler.service.moving import given, planned_anew
from scheduler.service.origins import GoneError, Origins
from scheduler.service.readers import Readers
from scheduler.state.endings import Ending
from scheduler.state.history import Histories
from scheduler.state.jobs import DuplicateError, Page
from scheduler.state.nodes import NODE
from scheduler.state.store import TERMINAL, StoreError

_CANCEL_WAIT_S = 15.0
_DRAIN_S = 5.0
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SchedulerService(SchedulerServicer):
    """The gRPC methods; all state lies in `jobs`, `nodes`, `dispatcher` and `artifacts`."""

    def __init__(
        self,
        parts: Context,
        dispatcher: Dispatcher,
        stop: threading.Event,
        artifacts: Artifacts,
        histories: Histories,
        access: Access,
        origins: Origins,
    ) -> None:
        self._artifacts = artifacts
        self._origins = origins
        self._access = access
        self._store, self._jobs, self._nodes = parts.store, parts.jobs, parts.nodes
        self._leadership, self._channels = parts.leadership, parts.channels
        self._dispatcher = dispatcher
        self._histories = histories
        self._stop = stop
        self._submitting = threading.Lock()
        self._readers = Readers(stop, access.callers)

    def Submit(self, request: SubmitRequest, context: grpc.ServicerContext) -> SubmitReply:  # noqa: N802
        """Queue a job, as one of the caller's user."""
        user = self._access.callers.of(context).user
        job_id = request.job_id or f"job-{uuid.uuid4().hex[:12]}"
        if not _JOB_ID.fullmatch(job_id):
            _refuse(context, f"job_id: {job_id!r}: expected 1 to 64 letters, digits and . _ -")
        if not request.job.schedule.offered.types:
            _refuse(context, "job.schedule.offered: empty; expected one resource type or more")
        if (shards := request.job.servers.shards) > MOST_SHARDS:
            _refuse(context, f"job.servers.shards: {shards}; expected at most {MOST_SHARDS}")
        digest = request.job.code_digest
        if digest and not self._artifacts.has(digest):
            refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"job.code_digest: {digest[:80]}: no such code is here; send it first",
                CODE_MISSING,
            )
        self._origins.check(request.job, context)
        try:
            with self._submitting:
                if self._jobs.get(job_id) is None:
                    self._artifacts.begin(job_id)
                    self._origins.take_over(request.job, job_id)
                    if digest:  # first, so that it is there to stay
                        self._artifacts.name(job_id, CODE_NAME, digest)
                created = self._jobs.submit(job_id, request.job, user)
        except DuplicateError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except GoneError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except MissingError as error:
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error), CODE_MISSING)
        except StoreError as error:
            _unavailable(context, error)
        self._dispatcher.wake()
        return SubmitReply(job_id=job_id, created=created)

    def GetJob(self, request: JobRequest, context: grpc.ServicerContext) -> JobStatus:  # noqa: N802
        """A job's status, with its spec."""
        status = self._status_of(request.job_id, context)
        self._origins.drop_gone(status)
        try:
            spec = self._store.spec(request.job_id)
        except StoreError as error:
            _unavailable(context, error)
        if spec is not None:
            status.job.CopyFrom(spec)
            if not self._access.callers.of(context).role.covers(Role.SUBMIT):
                status.job.ClearField("code_digest")  # who knows it may submit a job with that code
        return status

    def ListJobs(self, request: ListJobsRequest, context: grpc.ServicerContext) -> ListJobsReply:  # noqa: N802
        """A page of the jobs that the caller may see, without their specs."""
        page = self._page(context, request.limit, request.before, request.unended)
        return ListJobsReply(
            jobs=page.jobs, next=page.next, total=page.total, total_unended=page.total_unended
        )

    def WatchJob(  # noqa: N802
        self, request: JobRequest, context: grpc.ServicerContext
    ) -> Iterator[JobStatus]:
        """The status now and after each change, without the spec, to the end."""
        self._status_of(request.job_id, context)
        with self._readers.enter(context) as gone:
            yield from self._jobs.watch(request.job_id, gone)
        self._end_of_stream(request.job_id, context)

    def CancelJob(self, request: JobRequest, context: grpc.ServicerContext) -> JobStatus:  # noqa: N802
        """Stop a job; answers when its processes are stopped. A job that has ended stays so.

        Where that takes long it answers before, and where Redis does not take it with UNAVAILABLE.
        """
        job_id = request.job_id
        self._status_of(job_id, context)
        self._require_leadership(context)
        user = self._access.callers.of(context).user
        try:
            ending = Ending(END_CANCELLED, cancelled_by=user)
            self._dispatcher.cancel(job_id, ending, _CANCEL_WAIT_S)
        except StoreError as error:
            text = f"job {job_id}: it is being ended, but a scheduler started after this one "
            details = f"{text}would not know: {error}; cancel it again"
            refuse(context, grpc.StatusCode.UNAVAILABLE, details, STORE_UNREACHABLE)
        return self._status_of(job_id, context)

    def MoveJob(self, request: MoveJobRequest, context: grpc.ServicerContext) -> JobStatus:  # noqa: N802
        """Have a running job go over to another plan; it trains on until that is ready."""
        job_id = request.job_id
        self._status_of(job_id, context)
        self._require_leadership(context)
        attempt = self._dispatcher.get(job_id)
        try:
            if attempt is None:
                raise ChangeRefusedError(f"job {job_id} does not train")
            plan = (
                given(attempt, request.decision)
                if request.HasField("decision")
                else planned_anew(attempt, self._store.spec(job_id) or JobSpec())
            )
            return under_way.request(attempt, PlanChange("asked", plan))
        except BestPlanError as error:
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error), HAS_BEST_PLAN)
        except (ChangeRefusedError, InputError, OfferError) as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except StoreError as error:
            _unavailable(context, error)

    def Logs(self, request: LogsRequest, context: grpc.ServicerContext) -> Iterator[LogChunk]:  # noqa: N802
        """What the job's processes have printed from `offsets` on; with `follow`, to its end."""
        job_id = request.job_id
        self._status_of(job_id, context)

        def attempt() -> Attempt | None:
            found = self._dispatcher.get(job_id)
            return found if found is not None and not found.over.is_set() else None

        with self._readers.enter(context) as gone:
            try:
                yield from stream(
                    job_id,
                    self._store,
                    request.offsets,
                    lambda: found.logs if (found := attempt()) is not None else None,
                    lambda: request.follow and self._jobs.state(job_id) not in TERMINAL,
                    lambda seconds: self._readers.pause(seconds, gone),
                    gone,
                )
            except StoreError as error:
                _unavailable(context, error)
        if request.follow:
            self._end_of_stream(job_id, context)

    def GetDecision(self, request: JobRequest, context: grpc.ServicerContext) -> Decision:  # noqa: N802
        """A job's decision."""
        status = self._status_of(request.job_id, context)
        try:
            decision = self._store.decision(request.job_id)
        except StoreError as error:
            _unavailable(context, error)
        if decision is None:
            why = f": {status.reason}" if status.reason else ""
            details = f"job {request.job_id}: it has no decision{why}"[:2000]
            refuse(context, grpc.StatusCode.NOT_FOUND, details, NO_DECISION)
        return decision

    def ListDecisions(  # noqa: N802
        self, request: ListDecisionsRequest, context: grpc.ServicerContext
    ) -> ListDecisionsReply:
        """The decisions of a page of jobs, without what only one at a time is looked at for."""
        page = self._page(context, request.limit, request.before)
        try:
            found = self._store.decisions([status.job_id for status in page.jobs])
        except StoreError as error:
            _unavailable(context, error)
        reply = ListDecisionsReply(next=page.next)
        for status in page.jobs:
            decision = found.get(status.job_id)
            if decision is None:
                continue
            reply.decisions.append(
                JobDecision(
                    job_id=status.job_id,
                    job_name=status.name,
                    submitted_at=status.submitted_at,
                    decision=in_brief(decision),
                )
            )
        return reply

    def _page(
        self, context: grpc.ServicerContext, limit: int, before: str, unended: bool = False
    ) -> Page:
        caller = self._access.callers.of(context)
        return self._jobs.page(
            lambda status: caller.sees(status.job_id, status.submitted_by), limit, before, unended
        )

    def Plan(self, request: PlanRequest, context: grpc.ServicerContext) -> Decision:  # noqa: N802
        """Plan a workload without running it."""
        from scheduler.planning.planner import plan

        try:
            return plan(
                request.workload,
                request.resources,
                request.min_throughput or None,
                method=request.method or DEFAULT,
                seed=request.seed % 2**32,
                pin=dict(request.pin) or None,
                exclude=list(request.exclude),
                max_price_per_hour=request.max_price_per_hour or None,
                finish_by=request.finish_by_hours or None,
                pareto=request.pareto,
                finetune=request.finetune_s,
            ).to_message()
        except InputError as error:
            _refuse(context, str(error))

    def GetReplan(self, request: JobRequest, context: grpc.ServicerContext) -> Replan:  # noqa: N802
        """What a job's run was measured to take, up to now, and the proposal that stands."""
        self._status_of(request.job_id, context)
        try:
            record = self._store.replan(request.job_id) or Replan()
        except StoreError as error:
            _unavailable(context, error)
        attempt = self._dispatcher.get(request.job_id)
        measurement = attempt.measurement() if attempt is not None else None
        if measurement is not None:
            record.measurement.CopyFrom(measurement.to_message())
        return record

    def ListNodes(self, request: ListNodesRequest, context: grpc.ServicerContext) -> ListNodesReply:  # noqa: N802
        """A page of the live nodes and standing shards, with the units that jobs hold.

        Of processes, those of jobs that the caller may see.
        """
        caller = self._access.callers.of(context)
        nodes, following = self._nodes.page(request.limit, request.after)
        for node in nodes if not caller.sees_all else ():
            seen = [p for p in node.processes if self._access.sees_any([p.job_id], caller)]
            del node.processes[:]
            node.processes.extend(seen)
        return ListNodesReply(nodes=nodes, next=following)

    def DrainNode(self, request: DrainNodeRequest, context: grpc.ServicerContext) -> NodeStatus:  # noqa: N802
        """Have a node end once its jobs have left it; it knows so when this returns."""
        self._require_leadership(context)
        if not 0 < request.notice_s < math.inf:
            _refuse(context, f"notice_s: {request.notice_s}: expected seconds, above 0")
        node = self._nodes.get(request.node_id)
        if node is None or node.kind != NODE:
            text = f"node {request.node_id!r}: there is no such node"
            context.abort(grpc.StatusCode.NOT_FOUND, text)
        told = DrainRequest(term=self._store.term, node_id=node.node_id, notice_s=request.notice_s)
        try:
            status: NodeStatus = call(
                self._channels.node(node.address).Drain,
                told,
                what=f"node {node.node_id} at {node.address}: drain",
                timeout_s=_DRAIN_S,
                stop=self._stop.is_set,
            )
        except (CallError, Interrupted) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; it was not told")
        self._nodes.renew(status)
        return status

    def Heartbeat(self, request: HeartbeatRequest, context: grpc.ServicerContext) -> HeartbeatReply:  # noqa: N802
        """Renew a lease, or end it."""
        node = request.node
        if not node.node_id or node.kind not in ("node", "shard"):
            _refuse(
                context,
                f"node: id {node.node_id!r}, kind {node.kind!r}: expected an id, and node or shard",
            )
        if request.leaving:
            self._nodes.leave(node)
        else:
            self._nodes.renew(node)
        return HeartbeatReply(
            lease_s=self._nodes.lease_s,
            term=self._store.term,
            warm=self._dispatcher.may_need(node),
        )

    def Report(self, request: ProgressReport, context: grpc.ServicerContext) -> ReportReply:  # noqa: N802
        """Take in a worker's progress; `stop` once its job is over."""
        self._access.require(request.job_id, context)
        self._require_leadership(context)
        attempt = self._dispatcher.get(request.job_id)
        if attempt is not None and attempt.id.number == request.attempt:
            self._histories.add(request)
        try:
            return ReportReply(stop=attempt is None or attempt.report(request))
        except StoreError as error:
            _unavailable(context, error)

    def _require_leadership(self, context: grpc.ServicerContext) -> None:
        if not self._leadership.is_certain():
            context.abort(
                grpc.StatusCode.UNAVAILABLE, "this scheduler is not known to lead; say it again"
            )

    def _status_of(self, job_id: str, context: grpc.ServicerContext) -> JobStatus:
        return self._access.job(job_id, context)

    def _end_of_stream(self, job_id: str, context: grpc.ServicerContext) -> None:
        """A stream that ends before its job says why."""
        if self._stop.is_set() and self._jobs.state(job_id) not in TERMINAL:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")


def _refuse(context: grpc.ServicerContext, problem: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


def _unavailable(context: grpc.ServicerContext, error: StoreError) -> NoReturn:
    refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), STORE_UNREACHABLE)
