"""What works all the time in a scheduler goes on after any error, which health and metrics tell."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chassis.channels import connect
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_INTERNAL,
    FAILED,
    QUEUED,
    JobRequest,
    JobStatus,
    NodeStatus,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.runs.offer import wanted_types
from scheduler.service import process
from scheduler.service.process import SchedulerProcess
from tests.valkey import Valkey
from tests.waiting import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service:
    """A scheduler in this process, as its callers see it."""

    def __init__(self, scheduler: SchedulerProcess, channel: grpc.Channel) -> None:
        self.process = scheduler
        self.stub = SchedulerStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def health(self) -> int:
        request = health_pb2.HealthCheckRequest()
        return int(self._health.Check(request, timeout=20).status)

    def submit(self, name: str) -> None:
        job = JobSpec(name=name)
        job.schedule.offered.types.add(name="v100", price_per_hour=1.0)
        self.stub.Submit(SubmitRequest(job_id=name, job=job), timeout=20)

    def get(self, name: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=name), timeout=20)

    def failures(self, loop: str) -> float:
        registry = self.process.metrics().registry
        return registry.get_sample_value("heterps_loop_failures_total", {"loop": loop}) or 0.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("endless")
    with pytest.MonkeyPatch.context() as shorter:
        shorter.setattr("chassis.loops._MOST_PAUSE_S", 0.2)
        shorter.setattr("scheduler.state.history.FLUSH_S", 0.2)
        yield from _serve(directory)


def _serve(directory: Path) -> Iterator[Service]:
    with Valkey(directory / "redis") as redis:
        scheduler = SchedulerProcess("127.0.0.1:0", redis.url, artifacts=directory / "artifacts")
        address = scheduler.start(lambda: None)
        with connect(address) as channel:
            yield Service(scheduler, channel)
        scheduler.stop()


@pytest.mark.parametrize(
    ("loop", "part", "method"),
    [
        ("leadership", "_leadership", "renew"),
        ("dispatch", "_dispatcher", "step"),
        ("jobs", "_store", "update"),
        ("nodes", "_store", "put_node"),
        ("history", "_store", "put_history"),
    ],
)
def test_each_goes_on_and_health_tells(
    service: Service, monkeypatch: pytest.MonkeyPatch, loop: str, part: str, method: str
) -> None:
    assert service.health() == SERVING
    before = service.failures(loop)

    def broken(*arguments: object) -> None:
        raise KeyError("unexpected")

    with monkeypatch.context() as faults:
        faults.setattr(getattr(service.process, part), method, broken)
        # Something for each to write.
        service.submit(f"job-{loop}")
        service.process._jobs._dirty.add(f"job-{loop}")
        node = NodeStatus(node_id="n", kind="node", type="cpu", units=1)
        service.process._nodes.renew(node)
        wait_until(lambda: service.failures(loop) > before, "it fails")
        wait_until(lambda: service.health() == NOT_SERVING, "health tells")
    service.process._nodes.leave(node)
    wait_until(lambda: service.health() == SERVING, "it is well again")
    wait_until(lambda: service.get(f"job-{loop}").reason == "waits for a node of type v100")


def test_a_job_that_cannot_be_begun_keeps_no_other_waiting_and_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: JobSpec) -> list[str]:
        if job.name == "poison":
            raise KeyError("unexpected")
        return wanted_types(job)

    monkeypatch.setattr(process, "wanted_types", broken)
    service.submit("poison")
    service.submit("healthy")
    wait_until(lambda: service.get("healthy").reason == "waits for a node of type v100")
    wait_until(lambda: service.get("poison").state == FAILED, "it is given up")
    found = service.get("poison")
    assert found.end_reason == END_INTERNAL
    assert "KeyError" in found.error
    assert service.get("healthy").state == QUEUED
    wait_until(lambda: service.health() == SERVING)
