"""Everything that runs in the scheduler's process, from the first call to the last."""

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from chassis.callers import RefusedError, job_token
from chassis.loops import Loop, Loops
from chassis.metrics import Metrics
from chassis.roles import GRANTED, Caller
from chassis.security import Security
from chassis.servers import Server
from protos.access_pb2_grpc import add_AccessServicer_to_server
from protos.artifacts_pb2_grpc import add_ArtifactsServicer_to_server
from protos.history_pb2_grpc import add_HistoryServicer_to_server
from protos.reason_pb2 import REASON_UNSPECIFIED
from protos.scheduler_pb2 import JOB_UNSPECIFIED
from protos.scheduler_pb2_grpc import add_SchedulerServicer_to_server
from scheduler.runs.calls import Channels
from scheduler.runs.context import Context
from scheduler.runs.dispatcher import Dispatcher
from scheduler.runs.offer import wanted_types
from scheduler.service.access import Access
from scheduler.service.access_service import AccessService
from scheduler.service.artifacts import CODE_LIMIT_BYTES, LIMIT_BYTES, Artifacts
from scheduler.service.artifacts_service import ArtifactsService
from scheduler.service.history_service import HistoryService
from scheduler.service.origins import Origins
from scheduler.service.scheduler_service import SchedulerService
from scheduler.service.takeover import gather
from scheduler.state import history as history_state
from scheduler.state import leadership
from scheduler.state import nodes as registry
from scheduler.state.history import Histories
from scheduler.state.jobs import FLUSH_S, KEPT, PRUNE_S, Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import LEASE_S, Nodes
from scheduler.state.store import TERMINAL, Store, StoreError
from scheduler.state.tokens import Tokens

_THREADS = 160
_STEP_S = 0.1
_CLOSE_WAIT_S = 10.0
_DEFERRED_S = 20.0  # nodes of before are asked first
_log = logging.getLogger("heterps.scheduler")


class SchedulerProcess:
    """Everything that runs in the scheduler's process.

    Args:
        advertise: host that workers reach the scheduler under, where it differs from `bind`'s.
        hand_over: leave running jobs to the next scheduler on this Redis when stopped, instead of
            ending them.
        artifacts: folder for the code and the models of jobs; one that ends with us unless given.
        artifacts_limit: bytes of all that.
        code_limit: bytes of the code of one job.
        keep_jobs: that have ended, the latest.

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
        keep_jobs: int = KEPT,
    ) -> None:
        self._temporary = None if artifacts else TemporaryDirectory(prefix="heterps-artifacts-")
        self._directory = artifacts or Path(self._temporary.name if self._temporary else "")
        self._limits = artifacts_limit, code_limit
        self._keep_jobs = keep_jobs
        self._bind = bind
        self._url = redis_url
        self._advertise = advertise
        self._lease_s = lease_s
        self._stop = threading.Event()
        self._hand_over = hand_over
        self._loops = Loops()

    def start(self, lost: Callable[[], None]) -> str:
        """Serve; the address for others.

        Args:
            lost: called when another scheduler has taken over.
        """
        self._store = Store(self._url)
        self._store.ping()
        self._leadership = Leadership(self._store, f"scheduler {uuid.uuid4().hex[:8]}")
        self._leadership.acquire()
        self._lost = lost
        self._begin("leadership", self._lead, leadership.RENEW_S)
        try:
            return self._serve()
        except BaseException:
            self._stop.set()
            self._loops.close()
            self._leadership.release()
            raise

    def _serve(self) -> str:
        histories = self._histories = Histories(self._store)
        jobs = Jobs(self._store, histories.enter)
        nodes = self._nodes = Nodes(self._store, self._lease_s)
        self._channels = Channels()
        tokens = Tokens(self._store)
        security = Security.from_environment()
        server = self._server = Server(
            "scheduler",
            self._bind,
            security=security,
            threads=_THREADS,
            lookup=lambda shown: self._known(tokens, shown),
        )
        access = Access(server.callers, jobs.get)

        def token_of(job_id: str) -> str:
            status = jobs.get(job_id)
            if security.asked_token is None or status is None:
                return ""
            return job_token(security.asked_token, status.submitted_by, job_id)

        server.add(
            add_AccessServicer_to_server, AccessService(tokens, server.callers), "heterps.v1.Access"
        )
        # The address is known once it listens, and calls come in at once: one waits in between.
        deferred = _Deferred()
        server.add(add_SchedulerServicer_to_server, deferred, "heterps.v1.Scheduler")

        def is_over(job_id: str) -> bool:
            return jobs.state(job_id) in (*TERMINAL, JOB_UNSPECIFIED)

        artifacts = Artifacts(self._directory, is_over, *self._limits)
        files = ArtifactsService(artifacts, is_over, access)
        server.add(add_ArtifactsServicer_to_server, files, "heterps.v1.Artifacts")
        history = HistoryService(histories, self._store, access, self._shards, token_of)
        server.add(add_HistoryServicer_to_server, history, "heterps.v1.History")
        address = server.start()
        self._loops.changed = self._tell_health
        if self._advertise:
            address = f"{self._advertise}:{address.rpartition(':')[2]}"
        context = Context(
            *(self._store, jobs, nodes, self._channels, address, self._leadership, token_of)
        )
        self._jobs, self._dispatcher = jobs, Dispatcher(context)
        gather(self._store, nodes, self._channels, address)
        self._dispatcher.resume()
        origins = self._origins = Origins(artifacts, jobs, access)
        served = (context, self._dispatcher, self._stop, artifacts, histories, access, origins)
        deferred.open(SchedulerService(*served))
        self._begin("jobs", jobs.flush, FLUSH_S)
        self._begin("nodes", nodes.flush, registry.FLUSH_S)
        self._begin("prune", self._prune, PRUNE_S)
        self._begin("history", histories.flush, history_state.FLUSH_S)
        dispatch = self._begin("dispatch", lambda: self._dispatcher.step(wanted_types), _STEP_S)
        self._dispatcher.wake = dispatch.kick
        return address

    def stop(self) -> None:
        """End; jobs wait, and run on, for the next scheduler."""
        hand_over = self._hand_over or self._leadership.lost.is_set()
        self._dispatcher.close(_CLOSE_WAIT_S, hand_over=hand_over)
        self._stop.set()
        self._server.stop(1.0)
        self._loops.close()
        for flush in (self._jobs.flush, self._nodes.flush, self._histories.flush):
            with suppress(StoreError):
                flush()
        self._leadership.release()
        self._channels.close()
        self._store.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _known(self, tokens: Tokens, shown: str) -> Caller | None:
        """Who holds a token that was made; nobody is told so who leads no more, as far as we know.

        Raises:
            RefusedError: it may have been made or revoked by another scheduler.
        """
        if not self._leadership.is_certain():
            text = "this scheduler is not known to lead; say it again"
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, text, REASON_UNSPECIFIED)
        return tokens.find(shown)

    def _shards(self, job_id: str) -> list[tuple[str, str]]:
        dispatcher: Dispatcher | None = getattr(self, "_dispatcher", None)  # calls come in at once
        attempt = dispatcher.get(job_id) if dispatcher is not None else None
        return attempt.shards() if attempt is not None else []

    def metrics(self) -> Metrics:
        """What it shows to Prometheus, once started."""
        from scheduler.service.metrics import scheduler_metrics

        return scheduler_metrics(self._jobs, self._nodes, self._loops)

    def admits_to_metrics(self, shown: str) -> bool:
        """Whether a token that was made shows all jobs, of which the metrics tell."""
        try:
            caller = self._server.callers.known(shown)
        except RefusedError:
            return False
        return caller.role in GRANTED and caller.sees_all

    def _begin(self, name: str, step: Callable[[], None], every_s: float) -> Loop:
        return self._loops.start(name, step, every_s, expected=(StoreError,))

    def _lead(self) -> None:
        if not self._leadership.renew():
            _log.critical("another scheduler has taken over; ending")
            self._lost()

    def _prune(self) -> None:
        gone = self._jobs.prune(self._keep_jobs)
        self._histories.forget(gone)
        for job_id in gone:
            self._origins.forget(job_id)
        if gone:
            _log.info("%d jobs that ended are not kept any more, up to %s", len(gone), gone[-1])

    def _tell_health(self) -> None:
        self._server.set_health(serving=not self._loops.failing)


class _Deferred:
    """A servicer whose methods wait until the real one is there."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._service: SchedulerService | None = None

    def open(self, service: SchedulerService) -> None:
        self._service = service
        self._opened.set()

    def __getattr__(self, method: str) -> Callable[..., object]:
        def forward(request: object, context: grpc.ServicerContext) -> object:
            self._opened.wait(_DEFERRED_S)
            return getattr(self._service, method)(request, context)

        return forward
