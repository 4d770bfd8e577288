"""The scheduler's process and its gRPC service.

Usage: python -m scheduler.service [--bind HOST:PORT] [--redis URL] [--ready-file F]
"""

import argparse
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NoReturn

import grpc

from protos.artifacts_pb2_grpc import add_ArtifactsServicer_to_server
from protos.decision_pb2 import Decision
from protos.history_pb2_grpc import add_HistoryServicer_to_server
from protos.metrics import Metrics, add_metrics_option, serve_metrics
from protos.process import announce, install_signals, setup_logging
from protos.scheduler_pb2 import (
    JOB_UNSPECIFIED,
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
    PlanRequest,
    ProgressReport,
    Replan,
    ReportReply,
    SubmitReply,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from protos.security import SecurityError
from protos.servers import BindError, Server
from scheduler import redis_tls
from scheduler.artifacts import CODE_LIMIT_BYTES, CODE_NAME, LIMIT_BYTES, Artifacts, MissingError
from scheduler.artifacts_service import ArtifactsService
from scheduler.calls import Channels
from scheduler.charge import Charge, HeldError
from scheduler.fields import InputError
from scheduler.history import Histories, HistoryService
from scheduler.jobs import DuplicateError, Jobs
from scheduler.logs import stream
from scheduler.nodes import LEASE_S, Nodes
from scheduler.offer import wanted_types
from scheduler.redis_server import EmbeddedRedis, RedisServerError
from scheduler.runner import DEFAULT_METHOD, Control, Run
from scheduler.runs import Runs
from scheduler.store import TERMINAL, Store, StoreError
from scheduler.takeover import gather

_THREADS = 160
_MAX_STREAMS = 128  # each holds a thread for as long as its reader stays
_STEP_S = 0.1
_CANCEL_WAIT_S = 20.0
_CLOSE_WAIT_S = 10.0
_GATE_S = 20.0  # nodes of before are asked first
# What makes a decision large: kilobytes a layer, where its figures are a few hundred bytes.
_BULKY: Final = (
    "workload",
    "resources",
    "probabilities",
    "alternatives",
    "training",
    "pareto",
    "relaxations",
    "reasons",
)
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = logging.getLogger("heterps.scheduler")


class SchedulerService(SchedulerServicer):
    """The gRPC methods; all state lies in `jobs`, `nodes`, `runs` and `artifacts`."""

    def __init__(
        self,
        control: Control,
        runs: Runs,
        stop: threading.Event,
        artifacts: Artifacts,
        histories: Histories,
    ) -> None:
        self._artifacts = artifacts
        self._store, self._jobs, self._nodes = control.store, control.jobs, control.nodes
        self._charge = control.charge
        self._runs = runs
        self._histories = histories
        self._stop = stop
        self._streams = threading.BoundedSemaphore(_MAX_STREAMS)

    def Submit(self, request: SubmitRequest, context: grpc.ServicerContext) -> SubmitReply:  # noqa: N802
        """Queue a job."""
        job_id = request.job_id or f"job-{uuid.uuid4().hex[:12]}"
        if not _JOB_ID.fullmatch(job_id):
            _refuse(context, f"job_id: {job_id!r}: expected 1 to 64 letters, digits and . _ -")
        if not request.job.schedule.offered.types:
            _refuse(context, "job.schedule.offered: empty; expected one resource type or more")
        digest = request.job.code_digest
        if digest and not self._artifacts.has(digest):
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"job.code_digest: {digest[:80]}: no such code is here; send it first",
            )
        try:
            if digest and self._jobs.get(job_id) is None:  # first, so that it is there to stay
                self._artifacts.name(job_id, CODE_NAME, digest)
            created = self._jobs.submit(job_id, request.job)
        except DuplicateError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except MissingError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except StoreError as error:
            _unavailable(context, error)
        return SubmitReply(job_id=job_id, created=created)

    def GetJob(self, request: JobRequest, context: grpc.ServicerContext) -> JobStatus:  # noqa: N802
        """A job's status, with its spec."""
        status = self._known(request.job_id, context)
        try:
            spec = self._store.spec(request.job_id)
        except StoreError as error:
            _unavailable(context, error)
        if spec is not None:
            status.job.CopyFrom(spec)
        return status

    def ListJobs(self, request: ListJobsRequest, context: grpc.ServicerContext) -> ListJobsReply:  # noqa: N802
        """All jobs in the order of submission, without their specs."""
        return ListJobsReply(jobs=self._jobs.all())

    def WatchJob(  # noqa: N802
        self, request: JobRequest, context: grpc.ServicerContext
    ) -> Iterator[JobStatus]:
        """The status now and after each change, without the spec, to the end."""
        self._known(request.job_id, context)
        with self._streaming(context) as gone:
            yield from self._jobs.watch(request.job_id, gone)
        self._end_of_stream(request.job_id, context)

    def CancelJob(self, request: JobRequest, context: grpc.ServicerContext) -> JobStatus:  # noqa: N802
        """Stop a job; answers when its processes are stopped. A job that has ended stays so."""
        job_id = request.job_id
        self._known(job_id, context)
        self._in_charge(context)
        if not self._runs.cancel_queued(job_id):
            run = self._runs.get(job_id)
            if run is not None:
                run.cancel()
                run.ended.wait(_CANCEL_WAIT_S)
        return self._known(job_id, context)

    def Logs(self, request: LogsRequest, context: grpc.ServicerContext) -> Iterator[LogChunk]:  # noqa: N802
        """What the job's processes have printed; with `follow`, until it ends."""
        job_id = request.job_id
        self._known(job_id, context)

        def run() -> Run | None:
            found = self._runs.get(job_id)
            return found if found is not None and not found.ended.is_set() else None

        with self._streaming(context) as gone:
            try:
                yield from stream(
                    job_id,
                    self._store,
                    lambda: found.logs if (found := run()) is not None else None,
                    lambda: request.follow and self._jobs.state(job_id) not in TERMINAL,
                    lambda seconds: self._pause(seconds, gone),
                    gone,
                )
            except StoreError as error:
                _unavailable(context, error)
        if request.follow:
            self._end_of_stream(job_id, context)

    def GetDecision(self, request: JobRequest, context: grpc.ServicerContext) -> Decision:  # noqa: N802
        """A job's decision."""
        status = self._known(request.job_id, context)
        try:
            decision = self._store.decision(request.job_id)
        except StoreError as error:
            _unavailable(context, error)
        if decision is None:
            why = f": {status.reason}" if status.reason else ""
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"job {request.job_id}: it has no decision{why}"[:2000]
            )
        return decision

    def ListDecisions(  # noqa: N802
        self, request: ListDecisionsRequest, context: grpc.ServicerContext
    ) -> ListDecisionsReply:
        """The decisions of the latest jobs, without what only one at a time is looked at for."""
        try:
            found = self._store.decisions(request.limit)
        except StoreError as error:
            _unavailable(context, error)
        reply = ListDecisionsReply()
        for status, decision in found:
            for name in _BULKY:
                decision.ClearField(name)
            reply.decisions.append(
                JobDecision(
                    job_id=status.job_id,
                    job_name=status.name,
                    submitted_at=status.submitted_at,
                    decision=decision,
                )
            )
        return reply

    def Plan(self, request: PlanRequest, context: grpc.ServicerContext) -> Decision:  # noqa: N802
        """Plan a workload without running it."""
        from scheduler import plan

        try:
            return plan(
                request.workload,
                request.resources,
                request.min_throughput or None,
                method=request.method or DEFAULT_METHOD,
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
        self._known(request.job_id, context)
        try:
            record = self._store.replan(request.job_id) or Replan()
        except StoreError as error:
            _unavailable(context, error)
        run = self._runs.get(request.job_id)
        measurement = run.measurement() if run is not None else None
        if measurement is not None:
            record.measurement.CopyFrom(measurement.to_message())
        return record

    def ListNodes(self, request: ListNodesRequest, context: grpc.ServicerContext) -> ListNodesReply:  # noqa: N802
        """Live nodes and standing shards, with the units that jobs hold."""
        return ListNodesReply(nodes=self._nodes.listed())

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
        return HeartbeatReply(lease_s=self._nodes.lease_s, term=self._store.term)

    def Report(self, request: ProgressReport, context: grpc.ServicerContext) -> ReportReply:  # noqa: N802
        """Take in a worker's progress; `stop` once its job is over."""
        self._in_charge(context)
        run = self._runs.get(request.job_id)
        if run is not None:
            self._histories.add(request)
        try:
            return ReportReply(stop=run is None or run.report(request))
        except StoreError as error:
            _unavailable(context, error)

    def _in_charge(self, context: grpc.ServicerContext) -> None:
        if not self._charge.sure():
            context.abort(grpc.StatusCode.UNAVAILABLE, "not known to be in charge; say it again")

    def _known(self, job_id: str, context: grpc.ServicerContext) -> JobStatus:
        status = self._jobs.get(job_id)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"job {job_id!r}: unknown")
        return status

    def _streaming(self, context: grpc.ServicerContext) -> "_Streaming":
        if not self._streams.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MAX_STREAMS} readers follow jobs already; try again later",
            )
        return _Streaming(self._streams, lambda: self._stop.is_set() or not context.is_active())

    def _end_of_stream(self, job_id: str, context: grpc.ServicerContext) -> None:
        """A stream that ends before its job says why."""
        if self._stop.is_set() and self._jobs.state(job_id) not in TERMINAL:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")

    def _pause(self, seconds: float, gone: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while not gone() and time.monotonic() < until:
            self._stop.wait(0.1)


class _Streaming:
    """Holds one place for a reader; entering gives the test of whether it has gone."""

    def __init__(self, places: threading.BoundedSemaphore, gone: Callable[[], bool]) -> None:
        self._places = places
        self._gone = gone

    def __enter__(self) -> Callable[[], bool]:
        return self._gone

    def __exit__(self, *error: object) -> None:
        self._places.release()


class SchedulerProcess:
    """Everything that runs in the scheduler's process.

    Args:
        advertise: host that workers reach the scheduler under, where it differs from `bind`'s.
        hand_over: leave running jobs to the next scheduler on this Redis when stopped, instead of
            ending them.
        artifacts: folder for the code and the models of jobs; one that ends with us unless given.
        artifacts_limit: bytes of all that.
        code_limit: bytes of the code of one job.

    Raises:
        StoreError, HeldError, BindError, SecurityError: from `start`.
    """

    def __init__(
        self,
        bind: str,
        redis_url: str,
        *,
        advertise: str = "",
        lease_s: float = LEASE_S,
        hand_over: bool = True,
        artifacts: Path | None = None,
        artifacts_limit: int = LIMIT_BYTES,
        code_limit: int = CODE_LIMIT_BYTES,
    ) -> None:
        self._temporary = None if artifacts else TemporaryDirectory(prefix="heterps-artifacts-")
        self._directory = artifacts or Path(self._temporary.name if self._temporary else "")
        self._limits = artifacts_limit, code_limit
        self._bind = bind
        self._url = redis_url
        self._advertise = advertise
        self._lease_s = lease_s
        self._stop = threading.Event()
        self._hand_over = hand_over
        self._threads: list[threading.Thread] = []

    def start(self, lost: Callable[[], None]) -> str:
        """Serve; the address for others.

        Args:
            lost: called when another scheduler has taken over.
        """
        self._store = Store(self._url)
        self._store.ping()
        self._charge = Charge(self._store, f"scheduler {uuid.uuid4().hex[:8]}")
        self._charge.take()
        self._begin("charge", lambda: self._charge.keep(self._stop, lost))
        try:
            return self._serve()
        except BaseException:
            self._stop.set()
            self._charge.release()
            raise

    def _serve(self) -> str:
        histories = Histories(self._store)
        jobs = Jobs(self._store, histories.enter)
        nodes = self._nodes = Nodes(self._store, self._lease_s)
        self._channels = Channels()
        server = self._server = Server("scheduler", self._bind, threads=_THREADS)
        # The address is known once it listens, and calls come in at once: a gate in between.
        gate = _Gate()
        server.add(add_SchedulerServicer_to_server, gate, "heterps.v1.Scheduler")

        def is_over(job_id: str) -> bool:
            return jobs.state(job_id) in (*TERMINAL, JOB_UNSPECIFIED)

        artifacts = Artifacts(self._directory, is_over, *self._limits)
        files = ArtifactsService(artifacts, is_over)
        server.add(add_ArtifactsServicer_to_server, files, "heterps.v1.Artifacts")
        history = HistoryService(
            histories, lambda job_id: jobs.get(job_id) is not None, self._shards
        )
        server.add(add_HistoryServicer_to_server, history, "heterps.v1.History")
        address = server.start()
        if self._advertise:
            address = f"{self._advertise}:{address.rpartition(':')[2]}"
        control = Control(self._store, jobs, nodes, self._channels, address, self._charge)
        self._jobs, self._runs = jobs, Runs(control)
        gather(self._store, nodes, self._channels, address)
        self._runs.resume()
        gate.open(SchedulerService(control, self._runs, self._stop, artifacts, histories))
        self._begin("flush", lambda: jobs.flush_loop(self._stop))
        self._begin("history", lambda: histories.flush_loop(self._stop))
        self._begin("dispatch", self._dispatch)
        return address

    def stop(self) -> None:
        """End; jobs wait, and run on, for the next scheduler."""
        hand_over = self._hand_over or self._charge.lost.is_set()
        self._runs.close(_CLOSE_WAIT_S, hand_over=hand_over)
        self._stop.set()
        self._server.stop(1.0)
        for thread in self._threads:
            thread.join(5.0)
        self._jobs.flush_all()
        self._charge.release()
        self._channels.close()
        self._store.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _shards(self, job_id: str) -> list[tuple[str, str]]:
        runs: Runs | None = getattr(self, "_runs", None)  # calls come in at once
        run = runs.get(job_id) if runs is not None else None
        return run.shards() if run is not None else []

    def metrics(self) -> Metrics:
        """What it shows to Prometheus, once started."""
        from scheduler.metrics import scheduler_metrics

        return scheduler_metrics(self._jobs, self._nodes)

    def _begin(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _dispatch(self) -> None:
        while not self._stop.wait(_STEP_S):
            try:
                self._runs.step(wanted_types)
            except StoreError as error:
                _log.warning("%s", error)
                self._stop.wait(1.0)


class _Gate:
    """A servicer whose methods wait until the real one is there."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._service: SchedulerService | None = None

    def open(self, service: SchedulerService) -> None:
        self._service = service
        self._opened.set()

    def __getattr__(self, method: str) -> Callable[..., object]:
        def forward(request: object, context: grpc.ServicerContext) -> object:
            self._opened.wait(_GATE_S)
            return getattr(self._service, method)(request, context)

        return forward


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="heterps scheduler", description="Run the scheduler.")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--redis",
        default=os.environ.get("HETERPS_REDIS", ""),
        metavar="URL",
        help="rediss://:PASSWORD@HOST:PORT/DB, or redis:// on this machine; without it a server "
        "of its own is started",
    )
    parser.add_argument(
        "--allow-plain-redis",
        action="store_true",
        help="speak to a Redis of another host without TLS or a password",
    )
    parser.add_argument(
        "--redis-file", type=Path, metavar="FILE", help="holds that URL: it may have a password"
    )
    parser.add_argument("--directory", type=Path, help="where its own server keeps its data")
    parser.add_argument(
        "--artifacts",
        type=Path,
        metavar="DIR",
        help="where the code and the models of jobs are kept; default: in --directory",
    )
    parser.add_argument("--artifacts-limit", type=int, default=LIMIT_BYTES, metavar="BYTES")
    parser.add_argument("--code-limit", type=int, default=CODE_LIMIT_BYTES, metavar="BYTES")
    parser.add_argument("--advertise", default="", metavar="HOST", help="host for others to call")
    parser.add_argument("--lease", type=float, default=LEASE_S, metavar="SECONDS")
    add_metrics_option(parser)
    parser.add_argument("--ready-file", metavar="FILE", help="written once calls are answered")
    options = parser.parse_args(argv)
    setup_logging("scheduler")
    stop = threading.Event()
    install_signals(stop)
    try:
        with ExitStack() as stack:
            url, facts = options.redis, {}
            if options.redis_file is not None:
                url = options.redis_file.read_text().strip()
            redis_tls.require(url, options.allow_plain_redis)
            if not url:
                directory = options.directory or stack.enter_context(
                    TemporaryDirectory(prefix="heterps-redis-", ignore_cleanup_errors=True)
                )
                url = stack.enter_context(EmbeddedRedis(directory)).url
                facts = {"redis": url}  # a given one may hold a password
            if options.redis and not (options.artifacts or options.directory):
                _log.warning(
                    "code and models of jobs end with this process; --artifacts DIR keeps them"
                )
            scheduler = SchedulerProcess(
                options.bind,
                url,
                advertise=options.advertise,
                lease_s=options.lease,
                # Data that is removed with this process can be taken up by nobody.
                hand_over=bool(options.redis or options.directory),
                artifacts=options.artifacts or _beside(options.directory),
                artifacts_limit=options.artifacts_limit,
                code_limit=options.code_limit,
            )
            address = scheduler.start(stop.set)
            stack.callback(scheduler.stop)
            _log.info("listens on %s", address)
            if options.metrics:
                facts["metrics"], close = serve_metrics(options.metrics, scheduler.metrics())
                stack.callback(close)
            announce(options.ready_file, address=address, **facts)
            stop.wait()
            _log.info("stopping")
    except (BindError, SecurityError, StoreError, HeldError, RedisServerError, OSError) as error:
        _log.error("%s", error)
        return 1
    return 0


def _beside(directory: Path | None) -> Path | None:
    return directory / "artifacts" if directory is not None else None


def _refuse(context: grpc.ServicerContext, problem: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


def _unavailable(context: grpc.ServicerContext, error: StoreError) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


if __name__ == "__main__":
    sys.exit(main())
