"""Which workers have units and which share them, and what that makes of a job's pace."""

import random

import pytest

from protos.decision_pb2 import Decision
from protos.node_pb2 import SHARD, STAGE
from protos.scheduler_pb2 import JobStatus, NodeStatus
from scheduler.runs.processes import Process
from scheduler.runs.sharing import beside, note, pace, sharing, units_of


def node(name: str, kind: str = "cpu") -> NodeStatus:
    return NodeStatus(node_id=name, type=kind, address=f"host-{name[0]}:1")


def worker(index: int, rank: int, where: NodeStatus, *, shares: bool = False) -> Process:
    name = f"stage {index} worker {rank}"
    return Process(name, f"{name}, generation 3", STAGE, index, rank, where, shares=shares)


def decision(*seconds: float, staleness: int = 1, memory: float = 1.0) -> Decision:
    """Stages whose workers take so long for a sample, in units of 10 bytes."""
    made = Decision(throughput=1 / max(seconds), staleness=staleness)
    if not staleness:
        made.throughput = 1 / sum(seconds)
    for one in seconds:
        made.stages.add(type="cpu", units=2, compute_s=one, memory_bytes=memory)
    made.resources.types.add(name="cpu", price_per_hour=2.0, memory_bytes=10.0)
    return made


@pytest.mark.parametrize("seed", range(200))
def test_a_node_with_workers_has_a_unit_of_the_job_and_one_for_each_that_does_not_share(
    seed: int,
) -> None:
    draw = random.Random(seed)
    nodes = [node(name) for name in "abc"]
    workers = [worker(0, rank, draw.choice(nodes), shares=draw.random() < 0.5) for rank in range(5)]
    shard = Process("shard", "shard 0", SHARD, 0, 0, nodes[0])
    for one in nodes:
        here = [w for w in workers if w.node is one]
        own = sum(not w.shares for w in here)
        assert units_of([shard, *workers]).count(one.node_id) == (max(1, own) if here else 0)
    apart = sharing([shard, *workers])
    assert len(apart) + len(units_of([shard, *workers])) == len(workers)
    assert all(one.shares for one in apart)


def test_a_unit_that_two_share_takes_the_time_of_both() -> None:
    a, b, c = node("a"), node("b"), node("c")
    spread = [worker(0, 0, a), worker(0, 1, b), worker(1, 0, c)]
    beside_own = [spread[0], worker(0, 1, a, shares=True), spread[2]]
    beside_other = [spread[0], worker(0, 1, c, shares=True), spread[2]]
    overlapping, flushed = decision(0.3, 0.4), decision(0.3, 0.4, staleness=0)
    assert pace(spread, overlapping) == overlapping.throughput
    assert pace(beside_own, overlapping) == pytest.approx(1 / 0.6)
    assert pace(beside_other, overlapping) == pytest.approx(1 / 0.7)
    assert pace(spread, flushed) == flushed.throughput
    assert pace(beside_own, flushed) == pytest.approx(1 / (0.7 + 0.3))


def test_it_goes_where_it_costs_the_least_then_to_its_own_stage_then_near() -> None:
    lost = worker(0, 1, node("x1"))

    def home(*others: Process, plan: Decision) -> str:
        found, _ = beside(lost, others, plan, node)
        return found.node_id if found is not None else ""

    a, b, near = node("a"), node("b"), node("x2")
    assert home(worker(1, 0, a), worker(0, 0, b), plan=decision(1.0, 1.0)) == "b"
    assert home(worker(1, 0, a), worker(0, 0, b), plan=decision(1.0, 0.1)) == "a"
    assert home(worker(0, 0, a), worker(0, 2, near), plan=decision(1.0)) == "x2"
    busy = [worker(0, 0, a), worker(0, 2, a, shares=True), worker(1, 0, b)]
    assert home(*busy, plan=decision(1.0, 1.0)) == "b"
    assert home(worker(0, 0, node("g", "gpu")), plan=decision(1.0)) == ""


def test_it_says_why_there_is_no_home() -> None:
    lost = worker(0, 1, node("x"))
    others = [worker(0, 0, node("a")), worker(1, 0, node("b"))]
    found, why = beside(lost, others, decision(1.0, 1.0, memory=6.0), node)
    assert found is None
    assert "stage 0 worker 1 need 12 bytes, node" in why
    found, why = beside(lost, [], decision(1.0), node)
    assert (found, why) == (None, "no unit of cpu is free, nor a worker of the job left on one")
    found, _ = beside(lost, others, decision(1.0, 1.0, memory=5.0), node)
    assert found is not None
    assert beside(lost, others, decision(1.0, 1.0), lambda name: None)[0] is None


def test_what_is_shared_is_told_until_it_is_over() -> None:
    plan, a, b = decision(0.5), node("a"), node("b")
    status = JobStatus()
    shared = [worker(0, 0, a), worker(0, 1, a, shares=True)]
    note(status, shared, plan, 1, 10.0)
    note(status, shared, plan, 1, 11.0)
    (one,) = status.shares
    assert (one.process, one.node, one.at, one.until) == ("stage 0 worker 1", "a", 10.0, 0.0)
    assert (one.price_per_hour, one.throughput) == (2.0, 1.0)
    note(status, [worker(0, 0, b, shares=True), worker(0, 1, b)], plan, 1, 12.0)
    assert [(s.process, s.until) for s in status.shares] == [
        ("stage 0 worker 1", 12.0),
        ("stage 0 worker 0", 0.0),
    ]
    note(status, [worker(0, 0, a), worker(0, 1, b)], plan, 1, 13.0)
    assert [s.until for s in status.shares] == [12.0, 13.0]
