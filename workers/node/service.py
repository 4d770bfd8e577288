"""What a scheduler has a node do, over gRPC."""

import json
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import grpc

from chassis.exits import exit_code_of, reason_of_exit, refusal_of
from chassis.files import lacks_room, read_regular
from chassis.process import describe_exit, last_lines
from chassis.refusal import refuse
from protos.decision_pb2 import Workload
from protos.node_pb2 import (
    SHARD,
    STAGE,
    DrainRequest,
    FollowRequest,
    LaunchReply,
    LaunchRequest,
    NodeStatusRequest,
    ProfileReply,
    ProfileRequest,
    ReadLogReply,
    ReadLogRequest,
    StopJobReply,
    StopJobRequest,
)
from protos.node_pb2_grpc import NodeServicer
from protos.reason_pb2 import REASON_UNSPECIFIED
from protos.scheduler_pb2 import END_DISK_FULL, NodeStatus
from workers.model.code.brought import CodeCache, CodeError
from workers.node.draining import Draining
from workers.node.kept_profiles import KeptProfiles
from workers.node.processes import LaunchError, Processes, told_of, wait_for

_PROFILE_TIMEOUT_S = 900.0
_WORKLOAD_BYTES = 1 << 28
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger("heterps.node")


class NodeService(NodeServicer):
    """The gRPC methods.

    Args:
        status: what this node is; its processes are filled in.
        code: that jobs bring.
        draining: whether it is to end.
        kept: profiles that were measured here before.
        follow: called with the address of a scheduler that has taken charge.
    """

    def __init__(
        self,
        status: NodeStatus,
        processes: Processes,
        stop: threading.Event,
        code: CodeCache,
        draining: Draining,
        kept: KeptProfiles,
        follow: Callable[[str], None] = lambda scheduler: None,
    ) -> None:
        self._kept = kept
        self._code = code
        self._draining = draining
        self._base = status
        self._processes = processes
        self._stop = stop
        self._follow = follow
        self._lock = threading.Lock()
        self._term = 0
        self._answering = set[object]()  # calls that work for a job

    def busy(self) -> bool:
        """Whether it works for any job."""
        return bool(self._answering) or self._processes.busy()

    def status(self) -> NodeStatus:
        """The node as it is now."""
        status = NodeStatus()
        status.CopyFrom(self._base)
        status.processes.extend(self._processes.statuses())
        status.units_used = sum(p.running and p.role == "stage" for p in status.processes)
        ends_in_s = self._draining.ends_in_s
        if ends_in_s is not None:
            status.draining, status.ends_in_s = True, ends_in_s
        return status

    def heard(self, term: int) -> bool:
        """Take in a scheduler's term; False when a later one has been heard of."""
        with self._lock:
            if term > self._term:
                _log.info("the scheduler's term is %d", term)
            self._term = max(self._term, term)
            return term == self._term

    def Follow(self, request: FollowRequest, context: grpc.ServicerContext) -> NodeStatus:  # noqa: N802
        """Obey and report to another scheduler from now on."""
        self._obey(request.term, context)
        if request.scheduler:
            self._follow(request.scheduler)
        return self.status()

    def Status(self, request: NodeStatusRequest, context: grpc.ServicerContext) -> NodeStatus:  # noqa: N802
        """The node as it is now."""
        return self.status()

    def Profile(self, request: ProfileRequest, context: grpc.ServicerContext) -> ProfileReply:  # noqa: N802
        """Measure, or look at, a job's layers in another process, ended when the caller goes."""
        self._obey(request.term, context)
        self._refuse_if_draining(context)
        _check_id(request.job_id, "job_id", context)
        self._answer_first(context)
        key = "" if request.unmeasured else self._kept.key(request)
        if (known := self._kept.find(key, request.job_id)) is not None:
            _log.info("job %s: its profile is kept, and holds", request.job_id)
            return known
        brought = ProfileRequest()
        brought.CopyFrom(request)
        token = request.token
        request.ClearField("token")  # it goes into a file of its own
        with ExitStack() as stack:
            directory = self._processes.job_directory(request.job_id, request.attempt)
            stack.enter_context(_asking_for_room(directory, context))
            made = tempfile.TemporaryDirectory(dir=directory, prefix="profile-")
            work = stack.enter_context(made)
            asked, result, modules = (Path(work, n) for n in ("request", "workload", "modules"))
            try:
                request.job.CopyFrom(self._code.bring(request.job, Path(work, "code")))
            except CodeError as error:
                _fail(context, str(error))
            asked.write_bytes(request.SerializeToString())
            try:
                self._processes.hand(request.job_id, request.attempt, Path(work))
            except LaunchError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            told = ["--request", str(asked), "--result", str(result), "--type", self._base.type]
            told += ["--modules", str(modules)] if key else []
            kinds = {kind.name: kind.threads for kind in request.resources.types}
            left = context.time_remaining()
            deadline = min(_PROFILE_TIMEOUT_S, left if left is not None else _PROFILE_TIMEOUT_S)
            try:
                child = self._processes.helper(
                    *(request.job_id, request.attempt, token),
                    *("profile", "workers.profiling", told),
                    threads=kinds.get(self._base.type, 0) or 1,
                )
            except (LaunchError, OSError) as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            code = wait_for(child, deadline, lambda: self._stop.is_set() or not context.is_active())
            if code is None:
                context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"profiling took over {deadline:.0f} s"
                )
            if code != 0 or not result.exists():
                _fail(context, _problem(code, last_lines(child.log)), code)
            found = Workload.FromString(read_regular(result, _WORKLOAD_BYTES))
            if key and key == self._kept.key(brought):  # nothing has changed meanwhile
                with suppress(OSError, ValueError):
                    loaded = json.loads(read_regular(modules, _WORKLOAD_BYTES))
                    self._kept.keep(key, request.job_id, found, loaded)
            return ProfileReply(workload=found)

    def Launch(self, request: LaunchRequest, context: grpc.ServicerContext) -> LaunchReply:  # noqa: N802
        """Start one process; answers when it listens."""
        self._obey(request.term, context)
        self._refuse_if_draining(context)
        _check_id(request.process_id, "process_id", context)
        _check_id(request.job_id, "job_id", context)
        if request.role not in (SHARD, STAGE):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"role: {request.role}: expected SHARD or STAGE"
            )
        try:
            return self._processes.launch(request)
        except LaunchError as error:
            _fail(context, str(error), error.exit_code)

    def StopJob(self, request: StopJobRequest, context: grpc.ServicerContext) -> StopJobReply:  # noqa: N802
        """Stop every process of a job, up to an attempt, or some of one; safe to repeat."""
        self._answer_first(context)
        self._obey(request.term, context)
        _check_id(request.job_id, "job_id", context)
        grace_s = min(max(request.grace_s, 0.0), 60.0)
        if request.processes:
            of = request.job_id, request.attempt
            return StopJobReply(
                stopped=self._processes.stop_some(*of, set(request.processes), grace_s)
            )
        stopped = self._processes.stop_job(request.job_id, request.attempt, grace_s)
        self._kept.judge(request.job_id, request.came_to)
        if request.unfinished:
            self._processes.remove_unfinished(request.unfinished, request.attempt)
        return StopJobReply(stopped=stopped)

    def Drain(self, request: DrainRequest, context: grpc.ServicerContext) -> NodeStatus:  # noqa: N802
        """Take nothing new, and end once nothing of a job runs here."""
        self._obey(request.term, context)
        if request.node_id != self._base.node_id:
            context.abort(grpc.StatusCode.NOT_FOUND, f"this is node {self._base.node_id!r}")
        self._draining.ask(request.notice_s)
        return self.status()

    def ReadLog(self, request: ReadLogRequest, context: grpc.ServicerContext) -> ReadLogReply:  # noqa: N802
        """Bytes of a process's log; an offset behind the end is taken for the end."""
        reply = self._processes.read_log(request.process_id, request.offset, request.limit)
        if reply is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"process {request.process_id!r}: unknown to this node"
            )
        return reply

    def _answer_first(self, context: grpc.ServicerContext) -> None:
        """Have the node not end, as it drains, before this call has been answered."""
        this = object()
        self._answering.add(this)
        if not context.add_callback(lambda: self._answering.discard(this)):
            self._answering.discard(this)  # nobody waits for the answer

    def _refuse_if_draining(self, context: grpc.ServicerContext) -> None:
        if self._draining.ends_in_s is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "this node drains: it takes nothing new")

    def _obey(self, term: int, context: grpc.ServicerContext) -> None:
        if not self.heard(term):
            context.abort(
                grpc.StatusCode.ABORTED,
                f"the scheduler of term {term} was replaced: this node obeys term {self._term}",
            )


def _problem(code: int, log: str) -> str:
    """Why profiling failed: the last error, or else line, names it; all lines tell where."""
    lines = [line for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception): ", line)]
    cause = (raised or lines or ["it printed nothing"])[-1].strip()
    if code < 0:
        cause = f"the process ended {describe_exit(code)}"
    return "\n".join([f"profiling failed: {cause}", *lines])


def _check_id(text: str, name: str, context: grpc.ServicerContext) -> None:
    """Ids become names of files: nothing else may be in them."""
    if not _SAFE_ID.fullmatch(text):
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{name}: {text!r}: expected 1 to 128 letters, digits and . _ -",
        )


@contextmanager
def _asking_for_room(folder: Path, context: grpc.ServicerContext) -> Iterator[None]:
    """Refuse the call where there is no room on the disk for what it writes in `folder`."""
    try:
        yield
    except OSError as error:
        if not lacks_room(error):
            raise
        _fail(context, told_of(error, folder), exit_code_of(END_DISK_FULL))


def _fail(context: grpc.ServicerContext, problem: str, exit_code: int | None = None) -> NoReturn:
    """Refuse the call, with the reason that goes with the end of the process it was about."""
    reason = REASON_UNSPECIFIED
    if exit_code:
        reason = refusal_of(reason_of_exit(exit_code, problem))
    # Details travel in a header of limited size.
    refuse(context, grpc.StatusCode.FAILED_PRECONDITION, problem[:4000], reason)
