"""Schedulers that come back from the dead: what they began is followed on, never run twice."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from chassis.channels import connect
from protos.node_pb2 import LaunchRequest, StopJobRequest
from protos.node_pb2_grpc import NodeStub
from protos.scheduler_pb2 import (
    END_SCHEDULER_LOST,
    RUNNING,
    STARTING,
    SUCCEEDED,
    HeartbeatRequest,
    JobRequest,
    JobStatus,
    NodeStatus,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import DeposedError, Store
from tests.cluster import Roles
from tests.scheduler.lives import job, log_of, prepare, steps_of
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
STEPS = 40


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Roles]:
    """One Redis and node, and as many schedulers as are started."""
    with EmbeddedRedis(tmp_path / "redis") as redis, Roles(tmp_path, redis.url) as roles:
        yield roles


def get(stub: SchedulerStub) -> JobStatus:
    return stub.GetJob(JobRequest(job_id="job"), timeout=20)


def test_a_scheduler_that_wakes_up_after_another_took_over_does_nothing(
    cluster: Roles, tmp_path: Path
) -> None:
    prepare(tmp_path, STEPS)
    gate, halfway = tmp_path / "gate", tmp_path / "halfway"
    first = cluster.scheduler()
    stub = cluster.stub(first)
    node = cluster.node(first, "cpu", "--units", "2")
    old_term = stub.Heartbeat(
        HeartbeatRequest(node=NodeStatus(node_id="any", kind="node", type="none")), timeout=5
    ).term
    spec = job(tmp_path, "job", gate=str(gate), halfway=str(halfway), half=STEPS // 2)
    stub.Submit(SubmitRequest(job_id="job", job=spec), timeout=5)
    wait_until(lambda: get(stub).state == STARTING, "the job starts")

    os.kill(first.pid, signal.SIGSTOP)  # its calls to the node are under way
    second = cluster.scheduler()
    stub = cluster.stub(second)
    os.kill(first.pid, signal.SIGCONT)
    assert first.process.wait(60) == 0
    # What was starting goes back to the queue, as another attempt.
    wait_until(lambda: get(stub).attempt == 2, lambda: f"the job starts again: {get(stub)}")
    assert [a.end_reason for a in get(stub).attempts] == [END_SCHEDULER_LOST]

    with connect(node.address) as channel:
        late = LaunchRequest(
            process_id="job.shard-9", job_id="job", role=1, attempt=1, term=old_term
        )
        for call in (
            lambda: NodeStub(channel).Launch(late, timeout=30),
            lambda: NodeStub(channel).StopJob(
                StopJobRequest(job_id="job", attempt=9, term=old_term), timeout=10
            ),
        ):
            with pytest.raises(grpc.RpcError, match="was replaced: this node obeys term") as raised:
                call()
            assert raised.value.code() is grpc.StatusCode.ABORTED
    dead = Store(cluster.redis_url)
    dead.term = old_term
    with pytest.raises(DeposedError):
        dead.update(JobStatus(job_id="job", state=SUCCEEDED))
    dead.close()

    gate.touch()
    wait_until(lambda: get(stub).step > 2, "the job trains")
    os.kill(second.pid, signal.SIGSTOP)
    stub = cluster.stub(cluster.scheduler())
    status = get(stub)
    assert (status.state, status.attempt) == (RUNNING, 2)
    before = status.step
    halfway.touch()
    wait_until(lambda: get(stub).step > before, "reports come to the one in charge")
    os.kill(second.pid, signal.SIGCONT)
    assert second.process.wait(60) == 0

    status = list(stub.WatchJob(JobRequest(job_id="job"), timeout=300))[-1]
    assert (status.state, status.reason) == (SUCCEEDED, "")
    assert (status.attempt, status.step) == (2, STEPS)
    computed = steps_of(log_of(tmp_path, "job"))
    assert len(set(computed[-STEPS:])) == 1  # one process trained all of it
