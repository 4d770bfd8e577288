"""A job that trains goes over to other shards, which load the cut; the result is the same."""

import os
import signal
from collections import Counter

import grpc
import numpy as np
import pytest

from protos.decision_pb2 import Decision
from protos.scheduler_pb2 import END_SUCCEEDED, ListNodesRequest, MoveJobRequest
from tests.scheduler.runs.survivors import SHAPE, Service, move, plan, trains, used
from tests.waiting import wait_until

pytest.importorskip("workers.stage")

_STEPS = 60
_MANY = {"servers.shards": 0, "train.max_steps": _STEPS}  # a shard for each of their units
_NARROW = ((0, 2, "front", 1), (3, 3, "back", 1))


def with_shards(decision: Decision, kind: str, units: int) -> Decision:
    """The plan with parameter servers on units of a type."""
    decision.ps_units, decision.workload.ps_type = units, kind
    return decision


def shards(service: Service, job_id: str) -> Counter[str]:
    """Running ones of a job, by their nodes' type."""
    nodes = service.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
    return Counter(
        node.type
        for node in nodes
        for process in node.processes
        if process.job_id == job_id and process.running and process.label.startswith("shard")
    )


def moves(service: Service, name: str, decision: Decision, expected: dict[str, int]) -> None:
    """Have it move, and see where its shards are then, and that no others are left."""
    done = move(service, name, decision).moves[-1]
    assert not done.failed, done.failed
    wait_until(lambda: shards(service, name) == expected, f"shards: {expected}")
    trains(service, name, done.step + 3)


@pytest.mark.exhaustive
def test_shards_go_to_other_units_and_back(service: Service) -> None:
    """Units of another type, and none of its own; rows and weights are equal to the bit."""
    whole = service.submit(service.job("shards-stay", **_MANY))
    assert service.end(whole).end_reason == END_SUCCEEDED
    name = service.submit(service.may_be_held("shards-move", **_MANY))
    trains(service, name, 3)
    assert sum(shards(service, name).values()) == 1
    moves(service, name, with_shards(plan(service, name), "front", 1), {"front": 1})
    assert used(service) == {"front": 3, "back": 2}
    # Workers and shards may have the units of each other.
    moves(service, name, with_shards(plan(service, name), "cpu", 1), {"cpu": 1})
    assert used(service) == {"front": 2, "back": 2, "cpu": 1}
    moves(service, name, with_shards(plan(service, name), "", 0), {"cpu": 1})
    assert used(service) == {"front": 2, "back": 2}
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, _STEPS)
    assert service.digest(name) == service.digest(whole)
    wait_until(lambda: not any(used(service).values()), "all units are given back")


@pytest.mark.exhaustive
def test_one_shard_becomes_two_and_one_of_these_is_lost(service: Service) -> None:
    """Its rows are gone; all go back to the cut that it moved at, or to a later one."""
    whole = service.submit(service.job("shards-alone", **_MANY))
    assert service.end(whole).end_reason == END_SUCCEEDED
    spec = service.may_be_held("shards-double", **_MANY)
    spec.retries = 2
    name = service.submit(spec)
    trains(service, name, 3)
    narrow = with_shards(plan(service, name, *_NARROW), "front", 2)
    moves(service, name, narrow, {"front": 2})
    assert used(service) == {"front": 3, "back": 1}
    with service.held():
        pids = service.pids(name)
        os.kill(pids["shard 1, generation 1"], signal.SIGKILL)
        wait_until(lambda: shards(service, name) == {"front": 2}, "it is started again")
    wide = with_shards(plan(service, name, (0, 2, "front", 2), (3, 3, "back", 2)), "cpu", 1)
    moves(service, name, wide, {"cpu": 1})
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, _STEPS)
    result, expected = service.result(name), service.result(whole)
    # Sums of a narrower plan have another order. A sample more or less would be seen by far.
    np.testing.assert_allclose(result.trained, expected.trained, rtol=1e-5)
    wait_until(lambda: not any(used(service).values()), "all units are given back")


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["before", "after"])
def test_shards_that_die_as_it_moves(service: Service, unfailed: str, when: str) -> None:
    """Before it goes over it keeps its plan, or it is started again; afterwards all go back."""
    spec = service.may_be_held(f"shards-die-{when}", **{"servers.shards": 0})
    spec.retries = 3
    name = service.submit(spec)
    trains(service, name, 4)
    decision = with_shards(plan(service, name), "front", 1)
    with service.held():
        service.stub.MoveJob(MoveJobRequest(job_id=name, decision=decision), timeout=20)
        label = "shard 0, generation 1"
        wait_until(lambda: label in service.pids(name), "the other shard is started")
        if when == "before":
            os.kill(service.pids(name)[label], signal.SIGKILL)
        wait_until(lambda: service.get(name).moves, "it moves, or says why not")
    if when == "after" and (pid := service.pids(name).get(label)):
        os.kill(pid, signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    assert service.digest(name) == unfailed
    wait_until(lambda: not any(used(service).values()), "all units are given back")


@pytest.mark.exhaustive
def test_shards_for_which_there_are_no_units_stay(service: Service, unfailed: str) -> None:
    name = service.submit(service.may_be_held("shards-too-many", **{"servers.shards": 0}))
    trains(service, name, 3)
    before = service.pids(name)
    done = move(service, name, with_shards(plan(service, name), "front", 4)).moves[-1]
    assert "not so many units" in done.failed
    assert service.pids(name) == before
    with pytest.raises(grpc.RpcError, match="tpu"):
        move(service, name, with_shards(plan(service, name), "tpu", 1))
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1)
    assert service.digest(name) == unfailed
