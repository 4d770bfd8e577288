"""A move that was accepted and that the job's end overtakes is told of, like any other."""

from collections.abc import Iterator

import pytest

from protos.scheduler_pb2 import (
    CANCELLED,
    END_USER_ERROR,
    FAILED,
    SUCCEEDED,
    JobRequest,
    JobState,
    MoveJobRequest,
)
from tests.scheduler.stub_node import BATCH, Service, serving
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("overtaken")
    with pytest.MonkeyPatch.context() as patch, serving(directory, patch) as made:
        yield made


@pytest.mark.parametrize(
    ("how", "state"),
    [("done", SUCCEEDED), ("failed", FAILED), ("killed", FAILED), ("cancelled", CANCELLED)],
)
def test_a_move_that_the_end_of_the_job_overtakes_is_told_of(
    service: Service, how: str, state: JobState.ValueType
) -> None:
    node, name = service.node, f"{how}-first"
    service.submit(service.spec(name, retries=0))
    worker = node.worker(name, 1)
    node.report(worker, step=5, total_steps=40)
    node.asked_to_pause = False
    plan = service.stub.GetDecision(JobRequest(job_id=name), timeout=20)
    request = MoveJobRequest(job_id=name, decision=plan)
    assert not service.stub.MoveJob(request, timeout=20).moves
    wait_until(lambda: node.asked_to_pause, "its workers are told to wait")
    if how == "done":
        told = {"step": 40, "samples": 40 * BATCH, "train_seconds": 1.0}
        node.report(worker, phase="done", **told)
    elif how == "failed":
        node.report(worker, phase="failed", error="ValueError: no", end_reason=END_USER_ERROR)
    elif how == "killed":
        node.kill(worker)
    else:
        service.stub.CancelJob(JobRequest(job_id=name), timeout=30)
    status = service.end(name)
    assert status.state == state
    (move,) = status.moves
    assert (move.reason, move.before, move.after) == ("asked", "1 cpu", "1 cpu")
    assert "ended before" in move.failed


def test_an_attempt_that_is_followed_by_another_tells_of_it_once(service: Service) -> None:
    node, name = service.node, "again"
    service.submit(service.spec(name, retries=1))
    worker = node.worker(name, 1)
    node.report(worker, step=5, total_steps=40)
    node.asked_to_pause = False
    plan = service.stub.GetDecision(JobRequest(job_id=name), timeout=20)
    service.stub.MoveJob(MoveJobRequest(job_id=name, decision=plan), timeout=20)
    wait_until(lambda: node.asked_to_pause, "its workers are told to wait")
    node.kill(worker)
    wait_until(lambda: service.get(name).attempts, "the attempt ends")
    wait_until(lambda: node.begun.count(name) == 2, "the next one is told to train")
    (second,) = [one for one in node.launched if (one.job_id, one.attempt) == (name, 2)]
    node.report(second, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
    status = service.end(name)
    assert status.state == SUCCEEDED
    (move,) = status.moves
    assert move.failed


def test_a_scheduler_that_takes_over_tells_of_a_move_that_was_under_way(service: Service) -> None:
    node, name = service.node, "followed"
    service.submit(service.spec(name, retries=1))
    worker = node.worker(name, 1)
    node.report(worker, step=5, total_steps=40)
    node.asked_to_pause = False
    plan = service.stub.GetDecision(JobRequest(job_id=name), timeout=20)
    service.stub.MoveJob(MoveJobRequest(job_id=name, decision=plan), timeout=20)
    wait_until(lambda: node.asked_to_pause, "its workers are told to wait")
    service.replace_scheduler()
    wait_until(lambda: service.get(name).moves, "it is told of")
    service.replace_scheduler()  # once, whoever follows
    node.report(worker, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
    status = service.end(name)
    assert status.state == SUCCEEDED
    (move,) = status.moves
    assert (move.reason, move.before, move.after, move.step) == ("asked", "1 cpu", "1 cpu", 5)
    assert move.failed == "the scheduler was restarted before it could go over"
