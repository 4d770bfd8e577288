"""What a follower makes of what nodes tell, beyond what whole jobs show."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.node_pb2 import STAGE
from protos.scheduler_pb2 import (
    END_LOST_NODE,
    END_OUT_OF_MEMORY,
    NodeStatus,
    ProcessStatus,
    ProgressReport,
)
from scheduler.runs import follow
from scheduler.runs.blame import ending_of
from scheduler.runs.calls import Channels
from scheduler.runs.follow import Follower
from scheduler.runs.processes import Process
from scheduler.state.endings import Ending
from scheduler.state.nodes import Nodes
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import Store
from tests.waiting import wait_until


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with EmbeddedRedis(tmp_path) as server:
        store = Store(server.url)
        yield Nodes(store, lease_s=60.0)
        store.close()


def node(*processes: ProcessStatus) -> NodeStatus:
    return NodeStatus(node_id="n", kind="node", type="cpu", units=1, processes=processes)


def follower(nodes: Nodes) -> Follower:
    process = Process("job.stage-0-worker-0", "stage 0 worker 0", STAGE, 0, 0, node())
    return Follower([process], 1, nodes, Channels())


def ending(one: Follower) -> Ending:
    """By the leases alone: there is no node to ask."""
    return ending_of(wait_until(lambda: one._signs({}), "a sign"))


def test_a_node_that_came_back_without_the_process_has_lost_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_FORGOTTEN_S", 0.2)
    nodes.presume(node())  # a scheduler that has just come back has not heard of it yet
    one = follower(nodes)
    assert not one._is_forgotten(one._processes[0])
    nodes.renew(node())
    found = ending(one)
    assert found.reason == END_LOST_NODE
    assert "was started again and has lost stage 0 worker 0" in found.text


def test_a_process_that_the_kernel_killed_for_memory_says_so(nodes: Nodes) -> None:
    nodes.renew(
        node(
            ProcessStatus(
                process_id="job.stage-0-worker-0",
                job_id="job",
                exit_code=-9,
                out_of_memory=True,
                last_lines="reading\n",
            )
        )
    )
    found = ending(follower(nodes))
    assert found.reason == END_OUT_OF_MEMORY
    assert found.process == "stage 0 worker 0"
    assert "the kernel killed it, as memory had run out" in found.text
    assert found.last_lines == "reading"


def test_a_worker_that_had_trained_under_another_scheduler_may_end(nodes: Nodes) -> None:
    """Its last word was kept; it is not taken for one that left without a word."""
    done = ProcessStatus(process_id="job.stage-0-worker-0", job_id="job", exit_code=0)
    nodes.renew(node(done))
    one = follower(nodes)
    one.report(ProgressReport(job_id="job", phase="trained"))
    assert one._signs({}) == []
    one.report(ProgressReport(job_id="job", phase="done", output="there"))
    report = one.follow(lambda: False).report
    assert report is not None
    assert report.output == "there"
