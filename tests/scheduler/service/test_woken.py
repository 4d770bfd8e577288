"""A job that is submitted is looked at then, and not with the next round."""

from pathlib import Path

import pytest

from chassis.channels import connect
from protos.decision_pb2 import Resources, ResourceType
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobRequest, JobStatus, SubmitRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.service import process
from scheduler.service.process import SchedulerProcess
from scheduler.state.redis_server import EmbeddedRedis
from tests.waiting import wait_until


def test_a_job_that_is_submitted_waits_for_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STEP_S", 3600.0)
    job = JobSpec(name="none")
    job.schedule.offered.CopyFrom(Resources(types=[ResourceType(name="cpu", limit=1)]))
    with EmbeddedRedis(tmp_path / "redis") as redis:
        scheduler = SchedulerProcess("127.0.0.1:0", redis.url, artifacts=tmp_path / "artifacts")
        address = scheduler.start(lambda: None)
        try:
            with connect(address) as channel:
                stub = SchedulerStub(channel)
                stub.Submit(SubmitRequest(job_id="one", job=job))

                def reason() -> str:
                    status: JobStatus = stub.GetJob(JobRequest(job_id="one"))
                    return status.reason

                wait_until(lambda: "waits for a node of type cpu" in reason(), "it is seen")
        finally:
            scheduler.stop()
