"""What a follower makes of what nodes tell, beyond what whole jobs show."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.node_pb2 import SHARD, STAGE
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_DIVERGED,
    END_LOST_NODE,
    END_LOST_SHARD,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    FAILED,
    JobStatus,
    NodeStatus,
    ProcessStatus,
    ProgressReport,
)
from scheduler.runs import follow
from scheduler.runs.blame import Blame, ending_of
from scheduler.runs.calls import Channels, Stop
from scheduler.runs.follow import Follower, Outcome
from scheduler.runs.processes import Process
from scheduler.state.endings import Ending, may_retry
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


def follower(nodes: Nodes, workers: int = 1) -> Follower:
    processes = [
        Process(f"job.stage-0-worker-{rank}", f"stage 0 worker {rank}", STAGE, 0, rank, node())
        for rank in range(workers)
    ]
    return Follower(processes, 1, nodes, Channels())


def ended(code: int, rank: int = 0, last_lines: str = "") -> ProcessStatus:
    name = f"job.stage-0-worker-{rank}"
    return ProcessStatus(process_id=name, job_id="job", exit_code=code, last_lines=last_lines)


def ending(one: Follower) -> Ending:
    """By the leases alone: there is no node to ask."""
    return ending_of(wait_until(lambda: one._symptoms({}), "a symptom"))


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


def test_who_has_trained_is_replaced_with_who_was_to_save(nodes: Nodes) -> None:
    nodes.renew(node(ended(-9), ended(-9, 1)))
    one = follower(nodes, workers=2)
    one.report(ProgressReport(job_id="job", rank=1, phase="trained"))
    outcome = one.follow(lambda: False, lambda ending: True)
    assert outcome.lost is not None
    assert [process.rank for process in outcome.lost] == [0, 1]


def test_a_shard_is_lost_with_its_nodes_lease_and_not_before(nodes: Nodes) -> None:
    shard = Process("job.shard-0", "shard 0", SHARD, 0, 0, node())
    worker = Process("job.stage-0-worker-0", "stage 0 worker 0", STAGE, 0, 0, node())
    runs = ProcessStatus(process_id="job.shard-0", job_id="job", running=True)
    nodes.renew(node(runs, ended(-9)))  # there is nobody at its address
    one = Follower([shard, worker], 1, nodes, Channels())
    outcome = one.follow(lambda: False, lambda ending: True)
    assert outcome.lost == (worker,)
    nodes.leave(node())
    outcome = one.follow(lambda: False, lambda ending: True)
    assert outcome.lost == (shard, worker)


@pytest.mark.parametrize("answers", ["at once", "late"])
def test_a_node_that_is_late_to_renew_its_lease_ends_no_job(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    monkeypatch.setattr(follow, "COLLECT_S", 0.1)
    runs = ProcessStatus(process_id="job.stage-0-worker-0", job_id="job", running=True)
    asked: list[int] = []

    def ask(stop: Stop) -> dict[str, NodeStatus | str]:
        asked.append(1)
        silent = answers == "late" and len(asked) == 1
        return {"n": "does not answer any more" if silent else node(runs)}

    one = follower(nodes)
    monkeypatch.setattr(one, "_ask", ask)
    outcome = one.follow(lambda: False, lambda ending: False, lambda: len(asked) > 3)
    assert outcome == Outcome(due=True)


def test_nothing_is_replaced_where_a_standing_shard_is_gone(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "COLLECT_S", 0.1)
    there = NodeStatus(node_id="s", kind="shard", address="127.0.0.1:1")
    worker = Process("job.stage-0-worker-0", "stage 0 worker 0", STAGE, 0, 0, node())
    nodes.renew(node(ended(-9)))
    one = Follower(
        [Process("job.shard-0", "shard 0", SHARD, 0, 0, there, "127.0.0.1:1"), worker],
        1,
        nodes,
        Channels(),
    )
    outcome = one.follow(lambda: False, lambda ending: True)
    assert outcome.lost is None
    assert outcome.ending is not None
    assert outcome.ending.reason == END_LOST_SHARD


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


@pytest.mark.parametrize("how", ["in order", "killed", "with its node"])
def test_a_worker_that_had_trained_under_another_scheduler_may_end(nodes: Nodes, how: str) -> None:
    """Its last word was kept: nothing is missing without it, however it ends."""
    if how != "with its node":
        nodes.renew(node(ended(0 if how == "in order" else -9)))
    one = follower(nodes)
    assert one._symptoms({})
    one.report(ProgressReport(job_id="job", phase="trained"))
    assert one._symptoms({}) == []
    one.report(ProgressReport(job_id="job", phase="done", output="there"))
    report = one.follow(lambda: False).report
    assert report is not None
    assert report.output == "there"


@pytest.mark.parametrize(
    ("code", "log", "blame", "reason"),
    [
        (1, "ValueError: bad\n", Blame.FAILED, END_USER_ERROR),
        (1, "RuntimeError: connection timed out\n", Blame.FAILED, END_USER_ERROR),
        (75, "PeerLostError: gone\n", Blame.CONNECTION_LOST, END_CONNECTION_LOST),
        (71, "RuntimeError: no room\n", Blame.FAILED, END_OUT_OF_MEMORY),
        (-9, "MemoryError\n", Blame.KILLED, END_WORKER_CRASHED),
        (0, "", Blame.LEFT, END_WORKER_CRASHED),
    ],
)
def test_a_process_that_told_nothing_is_judged_by_its_exit_code(
    nodes: Nodes, code: int, log: str, blame: Blame, reason: int
) -> None:
    nodes.renew(node(ended(code, last_lines=log)))
    (symptom,) = follower(nodes)._symptoms({})
    assert (symptom.blame, symptom.reason) == (blame, reason)


@pytest.mark.parametrize(
    ("code", "log", "blame", "reason"),
    [
        (1, "std::bad_alloc\n", Blame.SHARD_ENDED, END_OUT_OF_MEMORY),
        (1, "ValueError: bad\n", Blame.SHARD_ENDED, END_LOST_SHARD),
        (-9, "", Blame.SHARD_KILLED, END_LOST_SHARD),
    ],
)
def test_a_shard_that_ends_is_lost(
    nodes: Nodes, code: int, log: str, blame: Blame, reason: int
) -> None:
    shard = Process("job.shard-0", "shard 0", SHARD, 0, 0, node())
    status = ProcessStatus(process_id="job.shard-0", exit_code=code, last_lines=log)
    nodes.renew(node(status))
    (symptom,) = Follower([shard], 1, nodes, Channels())._symptoms({})
    assert (symptom.blame, symptom.reason) == (blame, reason)


def test_who_lost_a_peer_is_not_to_blame_though_it_failed_first(nodes: Nodes) -> None:
    """What counts is what workers take their errors for, not the words of them."""
    nodes.renew(node(ended(75, 1)))
    one = follower(nodes, workers=3)
    for rank, error, reason in (
        (1, "PeerLostError: bad column", END_CONNECTION_LOST),
        (2, "ValueError: connection of two columns", END_USER_ERROR),
    ):
        report = ProgressReport(
            job_id="job", rank=rank, phase="failed", error=error, end_reason=reason
        )
        one.report(report)
    symptoms = sorted(one._symptoms({}), key=lambda symptom: (symptom.blame, symptom.when))
    assert [symptom.process for symptom in symptoms] == ["stage 0 worker 2", "stage 0 worker 1"]
    found = ending_of(symptoms)
    assert (found.reason, found.process) == (END_USER_ERROR, "stage 0 worker 2")


def test_what_diverged_says_so_where_its_model_is_and_not_that_it_left(nodes: Nodes) -> None:
    nodes.renew(node(ended(0)))  # it has saved and ended in order
    one = follower(nodes)
    report = ProgressReport(
        job_id="job",
        phase="failed",
        error="DivergedError: step 7: the loss is nan",
        end_reason=END_DIVERGED,
        output="there",
    )
    assert one.report(report)  # so that the job's progress, with its output, is this one
    found = ending(one)
    assert (found.reason, found.state) == (END_DIVERGED, FAILED)
    assert found.error == "DivergedError: step 7: the loss is nan"
    assert not may_retry(JobStatus(retries=5), found)
