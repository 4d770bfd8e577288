"""A job that trains goes over to other workers and plans, and the result is the same."""

import os
import signal
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    MoveJobRequest,
)
from tests.cluster import Roles
from tests.scheduler.runs.survivors import ALONE, SHAPE, Service, move, plan, trains, used
from tests.valkey import Valkey
from tests.waiting import wait_until

pytest.importorskip("workers.stage")


@pytest.mark.exhaustive
def test_widths_types_and_stages_change_and_the_losses_stay(service: Service) -> None:
    whole, name, steps = "unmoved", "moving", 90
    longer = ALONE | {"train.max_steps": steps}
    assert service.end(service.submit(service.job(whole, **longer))).end_reason == END_SUCCEEDED
    service.submit(service.may_be_held(name, **longer))
    ways = (
        ((0, 2, "front", 3), (3, 3, "back", 1)),
        ((0, 2, "front", 2), (3, 3, "back", 2)),
        ((0, 1, "front", 1), (2, 2, "front", 1), (3, 3, "back", 1)),
        ((0, 3, "back", 2),),
    )
    for number, way in enumerate(ways, 1):
        trains(service, name, 4 * number)
        moved = move(service, name, plan(service, name, *way)).moves[-1]
        assert not moved.failed, moved.failed
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, steps)
    assert [one.after for one in status.moves] == [
        *("3 front + 1 back", "2 front + 2 back", "1 front + 1 front + 1 back", "2 back"),
    ]
    np.testing.assert_allclose(service.losses(name, steps), service.losses(whole, steps), rtol=1e-5)
    wait_until(lambda: not any(used(service).values()), "all units are given back")


@pytest.mark.exhaustive
def test_a_plan_whose_units_are_not_there_leaves_the_job_as_it_was(
    service: Service, unfailed: str
) -> None:
    name = service.submit(service.may_be_held("too-wide"))
    trains(service, name, 3)
    before = service.pids(name)
    moved = move(service, name, plan(service, name, (0, 2, "front", 4), (3, 3, "back", 2)))
    assert "4 front" in moved.moves[0].failed
    assert service.pids(name) == before
    with pytest.raises(grpc.RpcError, match="do not cover"):
        move(service, name, plan(service, name, (0, 2, "front", 2)))
    with pytest.raises(grpc.RpcError, match="tpu"):
        move(service, name, plan(service, name, (0, 3, "tpu", 2)))
    status = service.end(name)
    assert (status.end_reason, status.attempt, len(status.moves)) == (END_SUCCEEDED, 1, 1)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("pause_s", [0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3])
def test_workers_that_die_while_it_moves(service: Service, unfailed: str, pause_s: float) -> None:
    """Whatever step of the move they die in, the old ones or the new: the result is the same."""
    spec = service.job(f"dies-{pause_s:g}")
    spec.retries = 3
    name = service.submit(spec)
    trains(service, name, 4)
    request = MoveJobRequest(job_id=name, decision=plan(service, name))
    service.stub.MoveJob(request, timeout=20)
    time.sleep(pause_s)
    pids = service.pids(name)
    victims = sorted(label for label in pids if label.startswith("stage 1"))
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    assert service.digest(name) == unfailed
    wait_until(lambda: not any(used(service).values()), "all units are given back")


@pytest.mark.exhaustive
def test_a_job_that_moved_goes_back_to_its_cut_under_the_plan_that_it_has(
    service: Service,
) -> None:
    whole, name = "unmoved-again", "moved-killed"
    assert service.end(service.submit(service.job(whole, **ALONE))).end_reason == END_SUCCEEDED
    spec = service.may_be_held(name, **ALONE)
    spec.retries = 1
    service.submit(spec)
    trains(service, name, 4)
    way = ((0, 2, "front", 2), (3, 3, "back", 1))
    moved = move(service, name, plan(service, name, *way)).moves[0]
    trains(service, name, moved.step + 3)
    with service.held():
        pids = service.pids(name)
        os.kill(pids["stage 1 worker 0, generation 1"], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert (recovery.back, recovery.step) == (True, moved.step)
    np.testing.assert_allclose(service.losses(name), service.losses(whole), rtol=1e-5)


@pytest.mark.exhaustive
def test_a_scheduler_that_dies_while_it_moves(tmp_path: Path) -> None:
    """The next one goes on with the plan before or the other one, and with no worker of both."""
    with Valkey(tmp_path / "redis") as redis, Roles(tmp_path, redis.url) as roles:
        service = Service(roles, tmp_path / "job")
        steps = {"train.max_steps": 300}
        whole = service.submit(service.job("whole", **steps))
        assert service.end(whole).end_reason == END_SUCCEEDED
        plans = set()
        for number in range(6):
            spec = service.job(f"led-{number}", **steps)
            spec.retries = 1
            name = service.submit(spec)
            trains(service, name, 3)
            request = MoveJobRequest(job_id=name, decision=plan(service, name))
            service.stub.MoveJob(request, timeout=20)
            time.sleep(0.25 * number)
            service.replace_scheduler()
            wait_until(lambda name=name: len(service.pids(name)) == 4 + 2, "one plan's workers")
            plans.add(any("generation" in label for label in service.pids(name)))
            status = service.end(name)
            assert (status.end_reason, status.step) == (END_SUCCEEDED, 300), status.reason
            (moved,) = status.moves
            assert not moved.failed or "the scheduler was restarted" in moved.failed
            assert service.digest(name) == service.digest(whole)
            wait_until(lambda: not any(used(service).values()), "all units are given back")
        assert plans == {False, True}, "before the write, and after it"
