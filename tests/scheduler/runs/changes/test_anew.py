"""What a running job is planned anew with: the nodes, the units and the samples that there are."""

import math
import time

import pytest

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobStatus, NodeStatus
from scheduler import plan
from scheduler.decision import record
from scheduler.runs.changes.anew import Joins, for_job, left_of, moving_of, offered_now, past_of
from scheduler.runs.offer import OfferError
from scheduler.state.nodes import Nodes
from scheduler.state.store import Store
from tests.scheduler.instances import cost, resources, workload

WORK = workload({"cpu": cost(2.0), "gpu": cost(0.5)}, samples=1e6)


def node(name: str, kind: str, units: int, draining: bool = False) -> NodeStatus:
    return NodeStatus(
        node_id=name, kind="node", type=kind, units=units, address=f"{name}:1", draining=draining
    )


class Alone(Store):
    """Redis that has nothing."""

    def __init__(self) -> None:
        pass

    def known_nodes(self) -> list[tuple[NodeStatus, float]]:
        return []

    nodes = known_nodes

    def put_node(self, status: NodeStatus, lease_s: float) -> None:
        pass


def registry(*statuses: NodeStatus) -> Nodes:
    made = Nodes(Alone(), lease_s=600.0)
    for status in statuses:
        made.renew(status)
    return made


def spec(**limits: int) -> JobSpec:
    made = JobSpec(name="job")
    for name, limit in limits.items():
        made.schedule.offered.types.add(
            name=name, price_per_hour=1.0, limit=limit, memory_bytes=1e9
        )
    made.schedule.given.CopyFrom(decided("cpu", "gpu").workload)
    return made


def decided(*types: str) -> Decision:
    layers = [{kind: layer["cost"][kind] for kind in types} for layer in WORK["layers"]]
    offer = {"cpu": (0.05, 4), "gpu": (1.0, 2)}
    made = plan(
        workload(*layers, samples=1e6), resources(**{k: offer[k] for k in types}), method="exact"
    )
    return made.to_message()


def test_units_of_other_jobs_and_of_nodes_that_drain_are_not_offered() -> None:
    nodes = registry(node("a", "cpu", 4), node("b", "cpu", 8), node("c", "cpu", 8, draining=True))
    nodes.restore("job", ["a", "a"])
    nodes.restore("other", ["a", "b", "b", "b"])
    found = offered_now(decided("cpu"), spec(cpu=100), nodes, "job")
    (kind,) = found.resources.types
    assert kind.limit == 12 - 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_of_units_of_several_cores_is_offered_more_of_these(size: int) -> None:
    before = decided("cpu")
    if size > 1:
        before.resources.types[0].threads = before.resources.types[0].node_units = size
    asked = spec(cpu=100)
    asked.schedule.offered.types[0].threads_any.extend([1, 2, 3])
    nodes = registry(node("a", "cpu", 7), node("b", "cpu", 8))
    nodes.size("job", {"cpu": size} if size > 1 else {})
    nodes.restore("job", ["a"])
    nodes.restore("other", ["a", "b", "b", "b"])
    (kind,) = offered_now(before, asked, nodes, "job").resources.types
    # As many as its own and what others leave hold: 6 of a's 7 cores, and 5 of b's 8.
    assert kind.limit == 6 // size + 5 // size
    assert (kind.threads or 1, kind.node_units or 1) == (size, size)
    assert kind.price_per_hour == size
    assert not kind.threads_any


def test_a_type_that_came_and_leaves_threads_open_is_offered_in_single_cores() -> None:
    before = decided("cpu", "gpu")
    del before.resources.types[0], before.workload.layers[0].cost["cpu"]
    asked = spec(cpu=4, gpu=2)
    asked.schedule.offered.types[0].threads_any.extend([2, 1])
    nodes = registry(node("a", "cpu", 4), node("b", "gpu", 2))
    found = offered_now(before, asked, nodes, "job")
    (kind,) = (one for one in found.resources.types if one.name == "cpu")
    assert (kind.limit, kind.threads, kind.node_units) == (4, 0, 0)
    assert found.workload.layers[0].cost["cpu"].compute_s == 2.0
    asked.schedule.given.threads["cpu"] = 2  # of which it would be refused
    assert "cpu" not in offered_now(before, asked, nodes, "job").workload.layers[0].cost


def test_a_type_that_came_is_offered_with_the_costs_that_the_job_gives() -> None:
    before = decided("cpu")
    assert "gpu" not in before.workload.layers[0].cost
    nodes = registry(node("a", "cpu", 4), node("b", "gpu", 2))
    found = offered_now(before, spec(cpu=4, gpu=2), nodes, "job")
    assert found.workload.layers[0].cost["gpu"].compute_s == 0.5
    assert [kind.name for kind in found.resources.types] == ["cpu", "gpu"]
    assert not found.excluded


def test_a_type_that_went_or_that_others_hold_is_excluded_and_comes_back() -> None:
    before = decided("cpu", "gpu")
    before.assignment[:] = ["cpu"]
    asked = spec(cpu=4, gpu=2)
    nodes = registry(node("a", "cpu", 4))
    gone = offered_now(before, asked, nodes, "job")
    assert list(gone.excluded) == ["gpu"]
    nodes.renew(node("b", "gpu", 1))
    nodes.restore("other", ["b"])
    assert list(offered_now(gone, asked, nodes, "job").excluded) == ["gpu"]
    nodes.release("other")
    assert not offered_now(gone, asked, nodes, "job").excluded
    asked.schedule.exclude.append("gpu")
    assert list(offered_now(gone, asked, nodes, "job").excluded) == ["gpu"]


def test_without_nodes_there_is_nothing() -> None:
    with pytest.raises(OfferError):
        offered_now(decided("cpu"), spec(cpu=4), registry(), "job")


def test_what_is_left_goes_by_the_steps_and_not_by_the_workload() -> None:
    status = JobStatus(step=90, total_steps=100, samples=900)
    assert left_of(status, decided("cpu")) == 100.0
    assert left_of(JobStatus(step=100, total_steps=100, samples=1000), decided("cpu")) == 0.0
    assert left_of(JobStatus(), decided("cpu")) == 1e6


def test_a_plan_for_the_rest_costs_what_all_samples_would_again() -> None:
    before = decided("cpu")
    before.min_throughput = 20.0
    whole = record.Decision.from_message(before)
    work = workload({"cpu": cost(2.0)}, samples=2.5e5)
    rest = plan(work, resources(cpu=(0.05, 4)), 19.5, method="exact")
    again = record.Decision.from_message(for_job(rest.to_message(), before))
    assert again.min_throughput == 20.0, "else the floor sinks with each move"
    assert again.workload is not None
    assert again.workload.samples == 1e6
    assert again.cost == pytest.approx(whole.cost)
    assert again.lower_bound == pytest.approx(whole.lower_bound)


def test_the_past_counts_moves_that_nobody_asked_for_and_rests_after_one_that_failed() -> None:
    status, now = JobStatus(began_at=time.time() - 3600), time.time()
    assert past_of(status, JobSpec()).moves == 0
    status.moves.add(reason="asked", at=now - 5)
    assert past_of(status, JobSpec()).moves == 0
    status.moves.add(reason="replanned", at=now - 50, failed="no units")
    past = past_of(status, JobSpec())
    assert (past.moves, past.rests) == (1, True)
    status.moves.add(reason="joined", at=now - 20, seconds=2.0)
    status.moves.add(reason="replanned", at=now - 10, seconds=2.0)
    past = past_of(status, JobSpec())
    assert past.moves == 2
    assert past.since_s == pytest.approx(8.0, abs=5.0)
    assert past.left_s == math.inf
    asked = JobSpec(deadline_hours=3.0)
    asked.schedule.finish_by_hours = 2.0
    assert past_of(status, asked).left_s == pytest.approx(3600, abs=60.0)


def test_what_moves_and_recoveries_took_is_expected_of_the_next() -> None:
    status = JobStatus()
    assert moving_of(status, 4.0).restart_s == 4.0
    status.moves.add(seconds=90.0, failed="it did not")
    status.moves.add(seconds=1.5)
    status.recoveries.add(seconds=3.0)
    assert moving_of(status, 4.0).seconds == 7.0


def test_nodes_that_join_are_seen_once() -> None:
    nodes = registry(node("a", "cpu", 4))
    joins = Joins(nodes)
    assert not joins.seen()
    nodes.renew(node("b", "cpu", 4))
    assert joins.seen()
    assert not joins.seen()
