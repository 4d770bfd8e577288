"""How jobs end and start over, with real processes: reasons, retries, deadlines, priorities."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    END_CANCELLED,
    END_DEADLINE,
    END_INFEASIBLE_PLAN,
    END_INVALID_JOB,
    END_SUCCEEDED,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    FAILED,
    PLANNING,
    STARTING,
    SUCCEEDED,
    JobRequest,
    JobStatus,
    LogsRequest,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.cluster import Roles
from tests.scheduler.lives import job, log_of, prepare, steps_of
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
STEPS = 20


class Service:
    """A scheduler with one node of one unit."""

    def __init__(self, stub: SchedulerStub, directory: Path) -> None:
        self.stub = stub
        self.directory = directory

    def job(self, name: str, **arguments: object) -> JobSpec:
        return job(self.directory, name, **arguments)

    def submit(self, spec: JobSpec) -> str:
        self.stub.Submit(SubmitRequest(job_id=spec.name, job=spec), timeout=20)
        return spec.name

    def get(self, job_id: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=job_id), timeout=20)

    def end(self, job_id: str) -> JobStatus:
        return list(self.stub.WatchJob(JobRequest(job_id=job_id), timeout=300))[-1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("life")
    prepare(directory, STEPS)
    with Roles(directory) as roles:
        scheduler = roles.scheduler()
        roles.node(scheduler, "cpu", "--units", "1")
        yield Service(roles.stub(scheduler), directory)


def test_a_crashed_worker_is_forgiven_once_where_the_job_says_so(service: Service) -> None:
    spec = service.job("again", pause_s=0.1)
    spec.retries = 1
    service.submit(spec)
    log = log_of(service.directory, "again")
    wait_until(lambda: service.get("again").step > 0, "it trains")
    os.kill(steps_of(log)[-1], signal.SIGKILL)
    status = service.end("again")
    assert (status.state, status.end_reason, status.attempt) == (SUCCEEDED, END_SUCCEEDED, 2)
    first = status.attempts[0]
    assert (first.number, first.end_reason) == (1, END_WORKER_CRASHED)
    assert first.process == "stage 0 worker 0"
    assert "ended by signal 9 (SIGKILL)" in first.reason
    assert status.step == STEPS
    chunks = list(service.stub.Logs(LogsRequest(job_id="again"), timeout=20))
    assert {c.process for c in chunks} >= {"stage 0 worker 0", "stage 0 worker 0 (attempt 2)"}


def test_an_error_of_the_jobs_own_code_is_not_retried_and_is_quoted(service: Service) -> None:
    spec = service.job("wrong", error="no such column")
    spec.retries = 3
    status = service.end(service.submit(spec))
    assert (status.state, status.end_reason, status.attempt) == (FAILED, END_USER_ERROR, 1)
    assert status.error.endswith("failed: ValueError: no such column")
    assert status.process == "stage 0 worker 0"
    assert "model.py" in status.last_lines


def test_what_cannot_be_planned_says_which_kind_it_is(service: Service) -> None:
    fast = service.job("fast")
    fast.schedule.min_throughput = 1e9
    assert service.end(service.submit(fast)).end_reason == END_INFEASIBLE_PLAN
    wrong = service.job("unknown-layer")
    wrong.schedule.pin["nothing"] = "cpu"
    status = service.end(service.submit(wrong))
    assert status.end_reason == END_INVALID_JOB
    assert "nothing" in status.error


def test_a_deadline_ends_a_job(service: Service) -> None:
    late = service.job("late", gate=str(service.directory / "never"))
    late.deadline_hours = 2.0 / 3600
    status = service.end(service.submit(late))
    assert (status.state, status.end_reason) == (FAILED, END_DEADLINE)
    assert "deadline_hours" in status.reason


def test_the_highest_priority_is_next(service: Service) -> None:
    never = str(service.directory / "never")
    service.submit(service.job("holds", gate=never))
    wait_until(lambda: service.get("holds").state == STARTING, "the first one has the unit")
    service.submit(service.job("low", gate=never))
    wait_until(lambda: "become free" in service.get("low").reason, "the second one waits")
    high = service.job("high", gate=never)
    high.priority = 5
    service.submit(high)
    wait_until(lambda: "become free" in service.get("high").reason, "the third one waits beside")

    def cancel(name: str) -> None:
        status = service.stub.CancelJob(JobRequest(job_id=name), timeout=60)
        assert (status.state, status.end_reason) == (CANCELLED, END_CANCELLED)

    cancel("holds")
    wait_until(lambda: service.get("high").state == STARTING, "the higher priority goes first")
    assert service.get("low").state == PLANNING
    cancel("low")
    cancel("high")
