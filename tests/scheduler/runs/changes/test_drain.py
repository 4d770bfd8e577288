"""Jobs leave nodes that drain: with nothing lost, at no cost to their retries."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.scheduler_pb2 import (
    END_LOST_NODE,
    PROFILING,
    QUEUED,
    SUCCEEDED,
    DrainNodeRequest,
    JobRequest,
    ListNodesRequest,
    NodeStatus,
)
from scheduler.runs.changes import drain
from tests.scheduler.stub_node import BATCH, Service, StubNode, serving
from tests.waiting import wait_until


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(tmp_path, monkeypatch) as made:
        yield made


def test_it_leaves_with_a_cut_that_has_all_it_had_and_goes_on_elsewhere(service: Service) -> None:
    node = service.node
    service.submit(service.spec("job", retries=0))
    first = node.worker("job", 1)
    told = [service.cut("job", 10)]
    node.report(first, told, step=14)
    assert not node.asked_to_pause
    node.drain(ends_in_s=60.0)
    wait_until(lambda: node.asked_to_pause, "it is told to take a cut and wait")
    # One from before has not all that was trained: it does not do.
    assert not node.report(first, told, step=19)
    assert not service.get("job").attempts
    told.append(service.cut("job", 21))
    node.report(first, told, step=21, phase="paused")
    wait_until(lambda: service.get("job").attempts, "the attempt ends")
    (went,) = service.get("job").attempts
    assert (went.end_reason, went.drained, went.step) == (END_LOST_NODE, True, 21)
    wait_until(lambda: service.get("job").state in (QUEUED, PROFILING), "it waits")
    assert not node.placed("job", 2), "nothing is placed on a node that drains"
    with StubNode(service.address, "another") as other:
        second = other.worker("job", 2)
        assert second.resume == f"{service.directory}/output/job.cuts/21"
        other.report(second, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
        assert service.end("job").state == SUCCEEDED


def test_workers_on_gpus_that_wait_for_a_cut_that_failed_begin_at_the_one_before(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "devices_of", lambda decision: ["cuda"])
    node = service.node
    service.submit(service.spec("job", retries=0))
    first = node.worker("job", 1)
    told = [service.cut("job", 10)]
    node.report(first, told, step=14)
    node.drain(ends_in_s=60.0)
    wait_until(lambda: node.asked_to_pause, "it is told to take a cut and wait")
    node.report(first, told, step=21, phase="paused")
    wait_until(lambda: service.get("job").attempts, "the attempt ends")
    (went,) = service.get("job").attempts
    assert (went.end_reason, went.drained) == (END_LOST_NODE, True)
    with StubNode(service.address, "another") as other:
        assert other.worker("job", 2).resume == f"{service.directory}/output/job.cuts/10"
    service.stub.CancelJob(JobRequest(job_id="job"), timeout=60)


def test_a_node_that_ends_before_costs_no_retry_either(service: Service) -> None:
    node = service.node
    service.submit(service.spec("job", retries=0, every=""))
    first = node.worker("job", 1)
    node.report(first, step=5)
    node.drain(ends_in_s=60.0)
    wait_until(lambda: node.asked_to_pause, "it is told to take a cut and wait")
    node.leave()
    with StubNode(service.address, "another") as other:
        second = other.worker("job", 2)
        assert second.resume == ""
        (went,) = service.get("job").attempts
        assert (went.end_reason, went.drained) == (END_LOST_NODE, True)
        other.report(second, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
        assert service.end("job").state == SUCCEEDED


def test_a_node_that_ends_as_it_is_about_to_be_left_is_not_left(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, real, step = service.node, drain.Drain._nodes, drain.Drain.step
    asked: list[NodeStatus] | None = None  # in a step, for the first time
    stepped: list[NodeStatus] = []

    def nodes(self: drain.Drain) -> list[NodeStatus]:
        nonlocal asked
        if asked:
            return []
        found = real(self)
        asked = asked if asked is None else found
        return found

    def stepping(self: drain.Drain) -> bool:
        nonlocal asked
        asked = []
        try:
            return step(self)
        finally:
            stepped.extend(asked)
            asked = None

    monkeypatch.setattr(drain.Drain, "_nodes", nodes)
    monkeypatch.setattr(drain.Drain, "step", stepping)
    monkeypatch.setattr(drain, "may_regroup", lambda job, devices: True)
    service.submit(service.spec("job", retries=0))
    first = node.worker("job", 1)
    node.report(first, step=14)
    node.drain(ends_in_s=60.0)
    wait_until(lambda: stepped, "it is noticed, and found to be gone")
    node.report(first, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
    assert (service.end("job").state, len(service.get("job").attempts)) == (SUCCEEDED, 0)
    assert not node.asked_to_pause


def test_a_job_that_is_about_to_end_is_let_be(service: Service) -> None:
    node = service.node
    service.submit(service.spec("job", retries=0))
    first = node.worker("job", 1)
    node.report(first, step=39, phase="trained")
    node.drain(ends_in_s=60.0)
    for _ in range(3):
        node.beat()
        assert not node.report(first, step=40, phase="save")
    assert not node.asked_to_pause
    node.report(first, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0)
    assert (service.end("job").state, len(service.get("job").attempts)) == (SUCCEEDED, 0)


def test_a_node_knows_that_it_drains_when_whoever_asked_for_it_hears_so(service: Service) -> None:
    node = service.node
    node.beat()
    asked = DrainNodeRequest(node_id="stub", notice_s=90.0)
    node.answers = False
    with pytest.raises(grpc.RpcError) as raised:
        service.stub.DrainNode(asked, timeout=20)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    node.answers = True
    node.beat()
    assert (node.asked_to_drain, _listed(service).draining) == (0.0, False), "it was not told"
    answer = service.stub.DrainNode(asked, timeout=20)
    assert (answer.node_id, answer.draining, node.asked_to_drain) == ("stub", True, 90.0)
    assert _listed(service).draining, "nothing is placed there from then on"
    with pytest.raises(grpc.RpcError) as raised:
        service.stub.DrainNode(DrainNodeRequest(node_id="nobody", notice_s=1.0), timeout=20)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def _listed(service: Service) -> NodeStatus:
    (found,) = service.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
    return found
