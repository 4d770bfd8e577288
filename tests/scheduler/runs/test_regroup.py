"""Workers that are killed are replaced while the others go on, and the result is the same."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.survive.job import Result, Shape, result_of, write_job
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    END_WORKER_CRASHED,
    FAILED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    Recovery,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.cluster import Roles
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
SHAPE = Shape(seconds=0.001, steps=27)
_TRAINING = {
    "train.clip": 0.5,
    "train.optimizer.warmup_steps": 5,
    "train.optimizer.schedule": "cosine",
}
# A worker that kills itself where its part of a step's rows is staged, or all are committed.
_FAULT = """
import os
import signal
import time

from model import Model
from workers.stage.commits import RowCommits


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
"""


class Service:
    """A scheduler, nodes of two units of each of two types and a spare, and one for the shards."""

    def __init__(self, roles: Roles, directory: Path) -> None:
        self.directory = directory
        write_job(directory, SHAPE)
        (directory / "fault.py").write_text(_FAULT)
        with (directory / ".heterpsignore").open("a") as file:
            file.write("!fault.py\n")
        scheduler = roles.scheduler()
        for kind, units in (("cpu", 1), ("front", 3), ("back", 2)):
            roles.node(scheduler, kind, "--units", str(units), "--emulate")
        self.stub: SchedulerStub = roles.stub(scheduler)

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

    def digest(self, job_id: str) -> str:
        """Of a job's weights and rows, to the bit."""
        return self.result(job_id).digest


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("regroup")
    with Roles(directory) as roles:
        yield Service(roles, directory / "job")


@pytest.fixture(scope="module")
def unfailed(service: Service) -> str:
    """What the job comes to where nothing happens to it."""
    status = service.end(service.submit(service.job("unfailed")))
    assert status.end_reason == END_SUCCEEDED, status.reason
    return service.digest("unfailed")


@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        (0, 0),
        *(pytest.param(*at, marks=pytest.mark.exhaustive) for at in ((0, 1), (1, 0), (1, 1))),
    ],
)
def test_the_others_keep_their_processes_and_the_result_is_the_same_to_the_bit(
    service: Service, unfailed: str, stage: int, rank: int
) -> None:
    name = f"killed-{stage}-{rank}"
    spec = service.job(name)
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    before = service.pids(name)
    victim = f"stage {stage} worker {rank}"
    os.kill(before.pop(victim), signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "it is replaced")
    after = service.pids(name)
    assert {label: after.get(label) for label in before} == before
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [victim]
    assert 4 <= recovery.step < SHAPE.steps
    assert service.digest(name) == unfailed


@pytest.mark.parametrize(
    ("when", "rank"),
    [
        ("before it is staged", 1),
        *(
            pytest.param(*at, marks=pytest.mark.exhaustive)
            for at in (
                ("before it is staged", 0),
                ("after it is staged", 0),
                ("after it is staged", 1),
                ("before they are committed", 0),
                ("after they are committed", 0),
            )
        ),
    ],
)
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_part_of_the_rows_is_lost_with_no_worker(
    service: Service, when: str, rank: int, staleness: int
) -> None:
    name = f"{when.replace(' ', '-')}-{rank}-{staleness}"
    fault = {"model.entry": "fault.py:build", "model.args.when": when, "model.args.rank": rank}
    spec = service.job(name, **fault, **{"train.clip": 0, "train.staleness": staleness})
    spec.retries = 1
    service.submit(spec)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [f"stage 0 worker {rank}"]
    assert (service.result(name).trained == SHAPE.steps / SHAPE.steps_per_epoch).all()


@pytest.mark.exhaustive
def test_one_death_after_another_before_a_step_is_over(service: Service, unfailed: str) -> None:
    name = "killed-again"
    spec = service.job(name)
    spec.retries = 3
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    for count, victim in enumerate(("stage 0 worker 1", "stage 1 worker 0", "stage 0 worker 0"), 1):
        pids = {label.partition(",")[0]: pid for label, pid in service.pids(name).items()}
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: len(service.recovered(name)) >= count, "it is replaced", pause_s=0.001)  # noqa: B023
    status = service.end(name)
    assert (status.end_reason, status.attempt, len(status.recoveries)) == (END_SUCCEEDED, 1, 3)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_two_at_once(service: Service, unfailed: str) -> None:
    name = "two-killed"
    spec = service.job(name)
    spec.retries = 2
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    pids = service.pids(name)
    for victim in ("stage 0 worker 0", "stage 1 worker 1"):
        os.kill(pids[victim], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_a_stage_that_is_gone_ends_the_attempt_which_names_it(
    service: Service, unfailed: str
) -> None:
    name = "stage-killed"
    spec = service.job(name)
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    pids = service.pids(name)
    for rank in range(2):
        os.kill(pids[f"stage 1 worker {rank}"], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 2), status.reason
    (first,) = status.attempts
    assert first.end_reason == END_WORKER_CRASHED
    assert first.process in ("stage 1 worker 0", "stage 1 worker 1")
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_with_staleness_no_step_is_lost(service: Service) -> None:
    losses = []
    for name in ("stale", "stale-killed"):
        spec = service.job(name, **{"train.staleness": 1})
        spec.retries = 1
        service.submit(spec)
        if name == "stale-killed":
            wait_until(lambda: service.get("stale-killed").step >= 4, "it trains")
            os.kill(service.pids(name)["stage 0 worker 0"], signal.SIGKILL)
        status = service.end(name)
        assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
        lines = (service.directory / "out" / name / "loss.csv").read_text().splitlines()[1:]
        losses.append([float(line.split(",")[1]) for line in lines])
    assert len(losses[0]) == len(losses[1]) == SHAPE.steps
    # The steps that were under way see rows that are fresher by a step.
    np.testing.assert_allclose(losses[1], losses[0], atol=0.02)


def test_each_time_takes_one_of_the_jobs_retries(service: Service) -> None:
    name = "not-forgiven"
    service.submit(service.job(name))
    wait_until(lambda: service.get(name).step >= 2, "it trains")
    os.kill(service.pids(name)["stage 1 worker 0"], signal.SIGKILL)
    status = service.end(name)
    assert (status.state, status.end_reason) == (FAILED, END_WORKER_CRASHED)
    assert status.process == "stage 1 worker 0"
