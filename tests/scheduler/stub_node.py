"""A node whose processes are a test's: it takes the scheduler's orders, and the test reports."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from chassis.channels import connect
from chassis.closing import Closing
from chassis.servers import Server
from protos.job_pb2 import JobSpec
from protos.node_pb2 import SHARD, LaunchReply, LaunchRequest, ReadLogReply, StopJobReply
from protos.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from protos.scheduler_pb2 import (
    Cut,
    HeartbeatRequest,
    JobRequest,
    JobStatus,
    NodeStatus,
    ProcessStatus,
    ProgressReport,
    ReportReply,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from protos.stage_pb2 import PauseReply, StartReply
from protos.stage_pb2_grpc import StageServicer, add_StageServicer_to_server
from scheduler.runs import follow
from scheduler.service.process import SchedulerProcess
from tests.scheduler.lives import job
from tests.valkey import Valkey
from tests.waiting import wait_until

_BEAT_S = 0.3
BATCH = 16


class StubNode(NodeServicer, StageServicer, Closing):
    """One unit of a type. Shards and workers are entries in a table.

    Args:
        scheduler: its address; another one that takes over tells its own.
    """

    def __init__(self, scheduler: str, node_id: str = "stub", kind: str = "cpu") -> None:
        self.scheduler = scheduler
        self._kind = kind
        self._node_id = node_id
        self._ends_in_s: float | None = None
        self.asked_to_pause = False
        self.asked_to_drain = 0.0  # seconds
        self.answers = True  # to that
        self.asked_to_warm = False
        self.launched: list[LaunchRequest] = []  # workers, in order
        self.begun: list[str] = []  # jobs whose workers were given the word
        self._processes: dict[str, ProcessStatus] = {}
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._server = Server("stub node", "127.0.0.1:0")
        self._server.add(add_NodeServicer_to_server, self, "heterps.v1.Node")
        self._server.add(add_StageServicer_to_server, self, "heterps.v1.Stage")
        self.address = self._server.start()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    # What the scheduler orders.

    def Launch(self, request: LaunchRequest, context: Any) -> LaunchReply:
        with self._changed:
            self._processes[request.process_id] = ProcessStatus(
                process_id=request.process_id,
                job_id=request.job_id,
                running=True,
                pid=1,
                attempt=request.attempt,
            )
            if request.role != SHARD:
                copy = LaunchRequest()
                copy.CopyFrom(request)
                self.launched.append(copy)
        return LaunchReply(address=self.address, pid=1)

    def StopJob(self, request: Any, context: Any) -> StopJobReply:
        with self._changed:
            gone = [
                name
                for name, one in self._processes.items()
                if one.job_id == request.job_id and one.attempt <= request.attempt
            ]
            for name in gone:
                del self._processes[name]
        return StopJobReply(stopped=len(gone))

    def Drain(self, request: Any, context: Any) -> NodeStatus:
        if not self.answers:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it is not there")
        self.asked_to_drain = self._ends_in_s = request.notice_s
        return self._status()

    def ReadLog(self, request: Any, context: Any) -> ReadLogReply:
        return ReadLogReply(ended=True)

    def Status(self, request: Any, context: Any) -> NodeStatus:
        return self._status()

    def Follow(self, request: Any, context: Any) -> NodeStatus:
        self.scheduler = request.scheduler or self.scheduler
        return self._status()

    def Pause(self, request: Any, context: Any) -> PauseReply:
        self.asked_to_pause = True
        return PauseReply()

    def Start(self, request: Any, context: Any) -> StartReply:
        self.begun.append(request.job_id)
        return StartReply()

    # What a test does.

    def worker(self, job_id: str, attempt: int) -> LaunchRequest:
        """The worker of an attempt, once it has the word."""

        def found() -> list[LaunchRequest]:
            return [o for o in self.launched if (o.job_id, o.attempt) == (job_id, attempt)]

        def told() -> bool:
            here = [o for o in self.launched if o.job_id == job_id and o.attempt <= attempt]
            return bool(found()) and self.begun.count(job_id) >= len(here)

        wait_until(told, "it is told to train")
        return found()[0]

    def report(self, worker: LaunchRequest, cuts: list[Cut] | None = None, **said: Any) -> bool:
        """Say something as a worker; whether it is to stop."""
        report = ProgressReport(
            job_id=worker.job_id, attempt=worker.attempt, **{"phase": "train", **said}
        )
        if cuts is not None:
            report.cuts.cuts.extend(cuts)
            report.cuts.SetInParent()
        with connect(self.scheduler) as channel:
            reply: ReportReply = SchedulerStub(channel).Report(report, timeout=20)
        return reply.stop

    def placed(self, job_id: str, attempt: int) -> bool:
        """Whether a worker of an attempt was started here."""
        return any((o.job_id, o.attempt) == (job_id, attempt) for o in self.launched)

    def drain(self, ends_in_s: float) -> None:
        """Say that it ends, and have the scheduler hear it."""
        self._ends_in_s = ends_in_s
        self.beat()

    def beat(self) -> None:
        """Renew the lease now."""
        with connect(self.scheduler) as channel:
            stub = SchedulerStub(channel)
            reply = stub.Heartbeat(HeartbeatRequest(node=self._status()), timeout=20)
        self.asked_to_warm = reply.warm

    def kill(self, worker: LaunchRequest) -> None:
        """Have a worker end by SIGKILL."""
        with self._changed:
            one = self._processes[worker.process_id]
            one.running, one.exit_code = False, -9
            self._changed.notify_all()

    def leave(self) -> None:
        """End with a goodbye."""
        self.close()
        with connect(self.scheduler) as channel:
            request = HeartbeatRequest(node=self._status(), leaving=True)
            SchedulerStub(channel).Heartbeat(request, timeout=20)

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join(10)
        self._server.stop(0.1)

    def _status(self) -> NodeStatus:
        with self._changed:
            return NodeStatus(
                node_id=self._node_id,
                kind="node",
                address=self.address,
                type=self._kind,
                units=1,
                cores=2,
                processes=list(self._processes.values()),
                draining=self._ends_in_s is not None,
                ends_in_s=self._ends_in_s or 0.0,
            )

    def _beat(self) -> None:
        while not self._over.is_set():
            try:
                with connect(self.scheduler) as channel:
                    stub = SchedulerStub(channel)
                    stub.Heartbeat(HeartbeatRequest(node=self._status()), timeout=5)
            except Exception:
                pass  # the scheduler is away
            with self._changed:
                self._changed.wait(_BEAT_S)


class Jobs:
    """A scheduler, whoever runs it, and a node whose workers are the test's."""

    def __init__(self, address: str, stub: SchedulerStub, directory: Path) -> None:
        self.directory, self.stub = directory, stub
        self.node = StubNode(address)

    def spec(self, name: str, retries: int = 1, every: str = "10 steps") -> JobSpec:
        spec = job(self.directory, name)
        spec.retries, spec.train.checkpoint.every = retries, every
        return spec

    def submit(self, spec: JobSpec) -> str:
        self.stub.Submit(SubmitRequest(job_id=spec.name, job=spec), timeout=20)
        return spec.name

    def get(self, name: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=name), timeout=20)

    def end(self, name: str) -> JobStatus:
        return list(self.stub.WatchJob(JobRequest(job_id=name), timeout=60))[-1]

    def cut(self, name: str, step: int, attempt: int = 1) -> Cut:
        place = f"{self.directory}/output/{name}.cuts/{step}"
        return Cut(step=step, place=place, attempt=attempt, samples=step * BATCH, taken_at=1e9)


class Service(Jobs):
    """The same with a scheduler in this process."""

    def __init__(self, redis: str, directory: Path, opened: ExitStack) -> None:
        self._redis, self._opened = redis, opened
        self._begin(directory)
        super().__init__(self.address, self.stub, directory)

    def _begin(self, directory: Path) -> None:
        artifacts = directory / "artifacts"
        self._process = SchedulerProcess("127.0.0.1:0", self._redis, artifacts=artifacts)
        self.address = self._process.start(lambda: None)
        self._opened.callback(self._process.stop)
        self.stub = SchedulerStub(self._opened.enter_context(connect(self.address)))

    def replace_scheduler(self) -> None:
        """Another one takes over."""
        self._process.stop()
        self._begin(self.directory)
        self.node.scheduler = self.address


@contextmanager
def serving(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A scheduler in this process, which believes a death at once, with such a node."""
    monkeypatch.setattr(follow, "COLLECT_S", 0.05)
    with Valkey(directory / "redis") as redis, ExitStack() as opened:
        made = Service(redis.url, directory, opened)
        yield made
        made.node.close()
