"""Where attempts begin: at the last cut that was told of, of this job alone, whoever dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from heterps import Client
from protos.scheduler_pb2 import (
    CANCELLED,
    END_CUT_UNREADABLE,
    END_SUCCEEDED,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    FAILED,
    SUCCEEDED,
    Cut,
    JobRequest,
    JobStatus,
)
from tests.cluster import Roles
from tests.scheduler.stub_node import BATCH, Jobs, Service, StubNode, serving
from tests.valkey import Valkey
from tests.waiting import wait_until


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(tmp_path, monkeypatch) as made:
        yield made


def finish(
    service: Service, name: str, attempt: int, step: int, before_s: float = 0.0
) -> JobStatus:
    worker = service.node.worker(name, attempt)
    told = {"step": step, "samples": step * BATCH, "train_seconds": 2.0, "before_s": before_s}
    service.node.report(worker, phase="done", **told)
    return service.end(name)


def test_a_retry_begins_at_the_newest_cut_and_the_status_goes_on_from_it(service: Service) -> None:
    node = service.node
    service.submit(service.spec("job"))
    first = node.worker("job", 1)
    folder = f"{service.directory}/output/job.cuts"
    assert (first.cuts, first.resume) == (folder, "")
    node.report(first, [service.cut("job", 10)], step=12, samples=12 * BATCH, loss=0.7)
    node.report(first, [service.cut("job", 10), service.cut("job", 20)], step=27, total_steps=40)
    node.kill(first)
    second = node.worker("job", 2)
    assert (second.cuts, second.resume) == (folder, f"{folder}/20")
    # A worker that was replaced and lives on, cut off: what it says counts no more.
    assert node.report(first, [service.cut("job", 30)], step=35)
    status = service.get("job")
    assert [cut.step for cut in status.cuts] == [10, 20]
    assert (status.from_step, status.from_samples) == (20, 20 * BATCH)
    assert (status.step, status.samples) == (20, 20 * BATCH)
    went = status.attempts[0]
    assert (went.end_reason, went.from_step, went.step) == (END_WORKER_CRASHED, 0, 27)
    assert went.started_at > 0
    assert went.price_per_hour == 1.0
    status = finish(service, "job", 2, 40, before_s=3.0)
    assert (status.state, status.end_reason, status.step) == (SUCCEEDED, END_SUCCEEDED, 40)
    assert [cut.step for cut in status.cuts] == [10, 20]
    measured = service.stub.GetDecision(JobRequest(job_id="job"), timeout=20).measured
    assert measured.throughput == pytest.approx(20 * BATCH / 2.0), "not the samples of before"
    assert measured.throughput_s == pytest.approx(2.0)
    assert measured.seconds == pytest.approx(3.0 + 2.0), "the steps before as long as they took"
    assert measured.cost == pytest.approx(1.0 * 5.0 / 3600)
    with Client(service.address) as client:
        one, two = client.plans("job")
    assert (one.plan, one.reason, one.attempt, one.from_step) == ("1 cpu", "planned", 1, 0)
    assert (two.plan, two.reason, two.attempt, two.from_step) == ("1 cpu", "planned", 2, 20)
    assert (one.measured, two.measured) == (0.0, pytest.approx(20 * BATCH / 2.0))
    assert one.began_at < two.began_at
    assert one.predicted == two.predicted > 0


def test_a_cut_that_cannot_be_read_gives_way_to_the_one_before_and_that_to_the_start(
    service: Service,
) -> None:
    node = service.node
    service.submit(service.spec("job"))
    first = node.worker("job", 1)
    node.report(first, [service.cut("job", 10), service.cut("job", 20)], step=25)
    node.kill(first)
    begun = []
    for attempt in (2, 3):
        worker = node.worker("job", attempt)
        begun.append(worker.resume.rpartition("/")[2])
        said = f"CutError: {worker.resume}: cut.json is damaged"
        node.report(worker, phase="failed", error=said, end_reason=END_CUT_UNREADABLE)
    last = node.worker("job", 4)
    assert (begun, last.resume) == (["20", "10"], "")
    # Of the steps that were given up none comes back, though their folders may be there.
    node.report(last, [service.cut("job", 20, 1), service.cut("job", 10, 4)], step=12)
    status = service.get("job")
    assert [(cut.step, cut.attempt) for cut in status.cuts] == [(10, 4)]
    assert [(a.end_reason, a.from_step) for a in status.attempts] == [
        (END_WORKER_CRASHED, 0),
        (END_CUT_UNREADABLE, 20),
        (END_CUT_UNREADABLE, 10),
    ]
    assert "is damaged" in status.attempts[1].error
    assert finish(service, "job", 4, 40).state == SUCCEEDED


def test_a_job_of_its_own_error_is_not_retried_and_another_goes_on_from_its_cut(
    service: Service,
) -> None:
    node = service.node
    service.submit(service.spec("job"))
    first = node.worker("job", 1)
    node.report(first, [service.cut("job", 10)], step=15)
    later = service.spec("later", retries=1)
    origin = later.train.resume
    origin.job_id, origin.step, origin.samples = "job", 10, 10 * BATCH
    origin.place = service.cut("job", 10).place
    with pytest.raises(grpc.RpcError) as refused:
        service.submit(later)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "job job: has not ended" in refused.value.details()
    node.report(first, phase="failed", error="ValueError: no", end_reason=END_USER_ERROR)
    status = service.end("job")
    assert (status.state, status.attempt, [c.step for c in status.cuts]) == (FAILED, 1, [10])

    service.submit(later)
    worker = node.worker("later", 1)
    assert worker.resume == origin.place
    assert worker.cuts == f"{service.directory}/output/later.cuts"
    assert (service.get("later").from_step, service.get("later").step) == (10, 10)
    node.kill(worker)  # before a cut of its own: it begins there again
    assert node.worker("later", 2).resume == origin.place
    unreadable = node.worker("later", 2)
    node.report(unreadable, phase="failed", error="gone", end_reason=END_CUT_UNREADABLE)
    status = service.end("later")
    assert (status.state, status.end_reason) == (FAILED, END_CUT_UNREADABLE), "not from step 1"


def test_a_cancelled_job_keeps_its_cuts(service: Service) -> None:
    service.submit(service.spec("job"))
    worker = service.node.worker("job", 1)
    service.node.report(worker, [service.cut("job", 10)], step=15)
    service.stub.CancelJob(JobRequest(job_id="job"), timeout=60)
    status = service.get("job")
    assert (status.state, [cut.step for cut in status.cuts]) == (CANCELLED, [10])


@pytest.mark.exhaustive
def test_a_cut_that_was_acknowledged_outlives_scheduler_and_redis(tmp_path: Path) -> None:
    with Valkey(tmp_path / "redis") as redis, Roles(tmp_path, redis.url) as roles:
        scheduler = roles.scheduler()
        service = Jobs(scheduler.address, roles.stub(scheduler), tmp_path)
        node = service.node
        try:
            service.submit(service.spec("job", retries=2))
            worker = node.worker("job", 1)
            node.report(worker, [service.cut("job", 10)], step=15)
            redis.kill()
            with pytest.raises(grpc.RpcError) as refused:
                node.report(worker, [service.cut("job", 20)], step=25)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            redis.start()
            wait_until(lambda: said(node, worker, service.cut("job", 30)), "it is taken")
            os.kill(scheduler.pid, signal.SIGKILL)
            scheduler.process.wait()
            scheduler = roles.scheduler()
            service.stub = roles.stub(scheduler)
            wait_until(lambda: node.scheduler == scheduler.address, "the node follows")
            status = service.get("job")
            assert (status.attempt, [cut.step for cut in status.cuts]) == (1, [30])
            node.kill(worker)
            second = node.worker("job", 2)
            assert second.resume == service.cut("job", 30).place
            assert second.scheduler == scheduler.address
            assert service.get("job").from_step == 30
        finally:
            node.close()


def said(node: StubNode, worker: object, cut: Cut) -> bool:
    try:
        return not node.report(worker, [cut], step=cut.step)  # type: ignore[arg-type]
    except grpc.RpcError:
        return False
