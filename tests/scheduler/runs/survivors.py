"""A job of two stages of two workers, on a cluster that tests of what becomes of it share."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bench.survive.job import Result, Shape, result_of, write_job
from chassis.process import Child
from heterps import Client
from heterps.client.records import PlanUse
from heterps.job.file import load_job
from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    LogsRequest,
    MoveJobRequest,
    Recovery,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.cluster import Roles
from tests.waiting import wait_until

SHAPE = Shape(seconds=0.001, steps=27)
_TRAINING = {
    "train.clip": 0.5,
    "train.optimizer.warmup_steps": 5,
    "train.optimizer.schedule": "cosine",
}
ALONE = {"schedule.min_throughput": 400}  # stages of one worker
# A worker that kills itself where its part of a step's rows is staged, or all are committed, or
# while it waits for the verdict, or at some point of a cut or of the end; one of two replacements
# that does as it starts, or waits while a file is there; and workers that end no step while a file
# is there, or until the judge is to have all wait, or they are to give the step up. A disk that is
# full for all but those who begin the training.
FAULT = """
import errno
import importlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from heterps import MoE
from model import Model
from workers.model.saved.model import SavedModel
from workers.stage.rows.commits import RowCommits
from workers.stage.cuts.folder import CutFolder
from workers.stage.cuts.judge import CutJudge
from workers.stage.cuts.part import Cuts
from workers.stage.update.ending import Ending
from workers.stage.running.executor import StageExecutor
from workers.stage.running.following import Following
from workers.stage.worker import Worker

worker = importlib.import_module("workers.stage.worker")
POINTS = {
    "training is over": (Worker, "_write_weights"),
    "its weights are written": (StageExecutor, "drain"),
    "it has trained": (Worker, "_stay"),
    "tables are to be saved": (Worker, "_save"),
    "pushes are held": (importlib.import_module("ps.client.save"), "_write_parts"),
    "tables are saved": (SavedModel, "finish"),
    "the model has its name": (worker, "check_saved"),
    "a part of a cut is written": (Cuts, "_files"),
    "a cut begins": (CutJudge, "_save_tables"),
    "a cut lacks its name": (CutFolder, "add"),
    "a validation begins": (Following, "_measured"),
    "a validation is over": (Following, "_validated"),
    "the best is to be kept": (Following, "_cut"),
    "the best is written": (CutJudge, "require"),
    "the best is to be the model": (worker, "restore_best"),
}


def launched():
    frame = sys._getframe()
    while frame is not None:
        if hasattr(frame.f_locals.get("launch"), "generation"):
            return frame.f_locals["launch"]
        frame = frame.f_back


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dies(deaths, **arguments):
    launch = launched()
    if launch is not None and not launch.generation:
        for when, stage, rank in deaths:
            if (launch.index, launch.rank) == (stage, rank):
                setattr(*POINTS[when], die)
        if any(when == "it has trained" for when, _, _ in deaths):
            own = Worker._save

            def saves(*parts):
                time.sleep(3.0)  # longer than it takes to see a death, and to blame somebody
                return own(*parts)

            Worker._save = saves
    return Model(**arguments)


def mixed(file, **arguments):
    model = held(file, **arguments)
    width = arguments["width"]
    model.tower.layer.append(MoE(width, 4, width, k=1, shadow=False, seed=0))
    return model


def one_dies(file, **arguments):
    launch = launched()
    if launch is not None and (launch.generation, launch.index) == (1, 1):
        die()
    return held(file, 2, **arguments)


def unjudged(rank, **arguments):
    wait = Ending._wait_for_verdict

    def waits(self, step):
        doomed = step == 6 and (self._place.stage, self._place.rank) == (1, rank)
        if doomed and self._notices._generation == 0:
            time.sleep(0.002)  # what it has reported is sent
            os.kill(os.getpid(), signal.SIGKILL)
        return wait(self, step)

    Ending._wait_for_verdict = waits
    return Model(**arguments)


def build(when, rank, **arguments):
    name = "_stage" if when.endswith("staged") else "_commit"
    own = getattr(RowCommits, name)

    def faulty(self, step, *others):
        doomed = step == 6 and self._rank == rank and self._series.endswith(".1.0.0")
        if doomed and when.startswith("before"):
            time.sleep(0.3)  # others would have come to the verdict
            os.kill(os.getpid(), signal.SIGKILL)
        own(self, step, *others)
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(RowCommits, name, faulty)
    return Model(**arguments)


def late(file, **arguments):
    launch = launched()
    while launch is not None and launch.generation and os.path.exists(file):
        time.sleep(0.01)
    return Model(**arguments)


def full(**arguments):
    launch, own, asked = launched(), SavedModel.require_room, []

    def room(self, size):
        if sys._getframe(1).f_code.co_name != "_run":
            return own(self, size)  # training is over
        asked.append(size)
        if len(asked) > 1 or (launch is not None and launch.generation):
            raise OSError(errno.ENOSPC, "it is full by now")
        own(self, size)

    SavedModel.require_room = room
    return Model(**arguments)


def first_dies(**arguments):
    launch = launched()
    if launch is not None and launch.generation == 1:
        die()
    return Model(**arguments)


def held(file, generation=0, **arguments):
    own = StageExecutor._apply
    watched = set()

    def let_go(asked):
        asked.wait()
        with suppress(FileNotFoundError):
            os.unlink(file)

    def waits(self):
        asked = self.progress.pause_asked
        if asked not in watched:  # it may be set while this one waits for another that is held
            watched.add(asked)
            threading.Thread(target=let_go, args=(asked,), daemon=True).start()
        while os.path.exists(file) and self._ending._notices._generation >= generation:
            if self._inbox.stopped:
                break  # others are replaced
            if asked.is_set():
                let_go(asked)
            time.sleep(0.01)
        return own(self)

    StageExecutor._apply = waits
    return Model(**arguments)
"""


class Service:
    """A scheduler, a node for the shards, three of a unit of one type, one of two of another."""

    def __init__(self, roles: Roles, directory: Path) -> None:
        self.directory, self.hold = directory, directory / "held"
        write_job(directory, SHAPE)
        (directory / "fault.py").write_text(FAULT)
        with (directory / ".heterpsignore").open("a") as file:
            file.write("!fault.py\n")
        self._roles = roles
        self._scheduler = roles.scheduler()
        self._nodes: list[Child] = []
        for kind, units in (("cpu", 1), ("front", 1), ("front", 1), ("front", 1), ("back", 2)):
            self.add_node(kind, units)
        self.stub: SchedulerStub = roles.stub(self._scheduler)

    def add_node(self, kind: str, units: int) -> None:
        """Start one, that waits for a minute for jobs to leave it."""
        told = ("--units", str(units), "--emulate", "--notice", "60")
        self._nodes.append(self._roles.node(self._scheduler, kind, *told))

    def nodes(self, kind: str) -> list[Child]:
        """Those of a type."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        addresses = {node.address for node in nodes if node.type == kind}
        return [node for node in self._nodes if node.address in addresses]

    def home(self, job_id: str, label: str) -> Child:
        """The node that a process of a job runs on."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        (address,) = {
            node.address
            for node in nodes
            for process in node.processes
            if (process.job_id, process.label) == (job_id, label)
        }
        return next(node for node in self._nodes if node.address == address)

    def replace_scheduler(self) -> None:
        """Kill it, and start another one on the same Redis."""
        os.kill(self._scheduler.pid, signal.SIGKILL)
        self._scheduler = self._roles.scheduler()
        self.stub = self._roles.stub(self._scheduler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step of a job that `may_be_held` ends meanwhile, unless they pause or give it up."""
        self.hold.touch()
        try:
            yield
        finally:
            self.hold.unlink(missing_ok=True)

    def may_be_held(self, name: str, **overrides: object) -> JobSpec:
        """As `job`."""
        held = {"model.entry": "fault.py:held", "model.args.file": str(self.hold)}
        return self.job(name, **held | overrides)

    def job(self, name: str, **overrides: object) -> JobSpec:
        spec = load_job(self.directory / "job.json", _TRAINING | overrides)
        spec.name = name
        return spec

    def submit(self, spec: JobSpec) -> str:
        self.stub.Submit(SubmitRequest(job_id=spec.name, job=spec), timeout=20)
        return spec.name

    def get(self, job_id: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=job_id), timeout=20)

    def end(self, job_id: str) -> JobStatus:
        return list(self.stub.WatchJob(JobRequest(job_id=job_id), timeout=300))[-1]

    def recovered(self, job_id: str) -> list[Recovery]:
        """When its workers were replaced; it has not ended."""
        status = self.get(job_id)
        assert not status.end_reason, status.reason
        return list(status.recoveries)

    def pids(self, job_id: str) -> dict[str, int]:
        """The running processes of a job, by label."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        found = [p for node in nodes for p in node.processes if p.job_id == job_id and p.running]
        return {process.label: process.pid for process in found}

    def result(self, job_id: str) -> Result:
        """What a job came to."""
        result = result_of(self.job("any"), self.directory / "out" / job_id)
        assert len(result.rows) > 40
        assert np.abs(result.rows).max() > 0.02  # they have learned
        return result

    def plans(self, job_id: str) -> list[PlanUse]:
        """That a job has trained under."""
        with Client(self._scheduler.address) as client:
            return client.plans(job_id)

    def losses(self, job_id: str, steps: int = SHAPE.steps) -> list[float]:
        """Of each step, as they are kept."""
        lines = (self.directory / "out" / job_id / "loss.csv").read_text().splitlines()[1:]
        assert len(lines) == steps
        return [float(line.split(",")[1]) for line in lines]

    def digest(self, job_id: str) -> str:
        """Of a job's weights and rows, to the bit."""
        return self.result(job_id).digest


def plan(service: Service, job_id: str, *stages: tuple[int, int, str, int]) -> Decision:
    """The job's plan, with other stages where these are given: first, last, type, units."""
    found = service.stub.GetDecision(JobRequest(job_id=job_id), timeout=20)
    if stages:
        del found.stages[:]
        for first, last, kind, units in stages:
            found.stages.add(first=first, last=last, type=kind, units=units)
    return found


def move(service: Service, job_id: str, to: Decision) -> JobStatus:
    """Ask for it, and wait until it has moved or said why not.

    No step ends until the others listen: however long that takes, it moves within a few steps.
    """
    moves = len(service.get(job_id).moves)
    with service.held():
        service.stub.MoveJob(MoveJobRequest(job_id=job_id, decision=to), timeout=20)
        wait_until(lambda: len(service.get(job_id).moves) > moves, "it moves")
    return service.get(job_id)


def trains(service: Service, job_id: str, step: int) -> None:
    wait_until(lambda: service.get(job_id).step >= step, "it trains")


def logged(service: Service, job_id: str) -> str:
    chunks = service.stub.Logs(LogsRequest(job_id=job_id), timeout=20)
    return "".join(chunk.text for chunk in chunks)


def used(service: Service) -> Counter[str]:
    """Units that jobs hold, by type."""
    nodes = service.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
    return sum((Counter({node.type: node.units_used}) for node in nodes), Counter())


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("survivors")
    with Roles(directory) as roles:
        yield Service(roles, directory / "job")


@pytest.fixture(scope="session")
def unfailed(service: Service) -> str:
    """What the job comes to where nothing happens to it."""
    status = service.end(service.submit(service.job("unfailed")))
    assert status.end_reason == END_SUCCEEDED, status.reason
    return service.digest("unfailed")
