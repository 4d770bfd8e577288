"""A job goes over to another plan by itself where its key says so, and what was measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.decision_pb2 import LayerCost
from protos.job_pb2 import JobSpec
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import JobRequest
from scheduler.runs.changes import watch
from tests.cluster import Roles
from tests.scheduler.lives import log_of, prepare, steps_of
from tests.scheduler.stub_node import BATCH, Service, StubNode, serving
from tests.waiting import wait_until

_STEPS = 100  # a report


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(watch, "FIRST_S", 0.2)
    monkeypatch.setattr(watch, "MOST_S", 0.2)
    monkeypatch.setattr(watch, "_IDLE", 1.0)
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    with serving(tmp_path, monkeypatch) as made:
        yield made


def spec(service: Service, name: str) -> JobSpec:
    """A job that is a little faster on a core than on a GPU, by its profile."""
    made = service.spec(name)
    made.schedule.offered.types.add(
        name="gpu", device="cpu", price_per_hour=1.0, limit=1, memory_bytes=1e9
    )
    cost = LayerCost(compute_s=0.15, parallel_compute=0.9, memory_bytes=1.0)
    made.schedule.given.layers[0].cost["gpu"].CopyFrom(cost)
    return made


def train(service: Service, worker: LaunchRequest, sample_s: float, total: int = 10**7) -> None:
    """Report some 20 windows of a run on a core, which take as long as is said."""
    for n in range(1, 22):
        seconds = n * _STEPS * BATCH * sample_s
        service.node.report(
            worker,
            step=n * _STEPS,
            total_steps=total,
            samples=n * _STEPS * BATCH,
            busy_s=seconds,
            stepped_s=seconds,
            train_seconds=seconds,
        )


def measured(service: Service, name: str) -> bool:
    """Whether what was measured has been considered."""
    return bool(service.stub.GetReplan(JobRequest(job_id=name), timeout=20).measurement.busy)


def test_auto_goes_over_to_what_was_measured_to_pay(service: Service) -> None:
    made = spec(service, "auto")
    made.schedule.replan = "auto"
    with StubNode(service.address, "other", "gpu") as other:
        service.submit(made)
        worker = service.node.worker("auto", 1)
        train(service, worker, sample_s=5 * 0.001)
        wait_until(lambda: other.placed("auto", 1), "a worker is started there")
        wait_until(lambda: service.node.asked_to_pause, "those that train are told to pause")


@pytest.mark.parametrize(
    ("mode", "slower", "total"),
    [("advise", 5.0, 10**7), ("off", 5.0, 10**7), ("auto", 1.0, 10**7), ("auto", 5.0, 2101)],
)
def test_it_stays_where_it_is_not_to_or_where_that_does_not_pay(
    service: Service, mode: str, slower: float, total: int
) -> None:
    made = spec(service, "stays")
    made.schedule.replan = mode
    with StubNode(service.address, "other", "gpu") as other:
        service.submit(made)
        worker = service.node.worker("stays", 1)
        train(service, worker, slower * 0.001, total)
        if mode == "off":
            for _ in range(20):
                other.beat()
        else:
            wait_until(lambda: measured(service, "stays"), "it is considered")
            wait_until(lambda: measured(service, "stays"), "and again")
        assert not other.placed("stays", 1)
        assert not service.node.asked_to_pause
        assert not service.get("stays").moves


def test_a_job_that_is_elastic_is_offered_a_node_that_joins(service: Service) -> None:
    made = spec(service, "elastic")
    made.schedule.elastic.max = 4
    service.submit(made)
    worker = service.node.worker("elastic", 1)
    train(service, worker, sample_s=5 * 0.001)
    wait_until(lambda: measured(service, "elastic"), "it is considered")
    with StubNode(service.address, "other", "gpu") as other:
        wait_until(lambda: other.placed("elastic", 1), "a worker is started there")


@pytest.mark.exhaustive
def test_a_real_job_of_a_wrong_profile_goes_over_once_and_trains_on(
    service: Service, tmp_path: Path
) -> None:
    """By its profile a dear unit is five times as fast as a cheap one; they are the same."""
    prepare(tmp_path)
    made = service.spec("wrong", every="")
    made.train.epochs = 1000
    made.schedule.replan = "auto"
    del made.schedule.offered.types[:]
    only = made.schedule.given.layers[0]
    only.cost.clear()
    for name, price, compute_s in (("dear", 4.0, 0.08), ("cheap", 1.0, 0.4)):
        made.schedule.offered.types.add(
            name=name, device="cpu", price_per_hour=price, limit=1, memory_bytes=1e9
        )
        cost = LayerCost(compute_s=compute_s, parallel_compute=0.9, memory_bytes=1.0)
        only.cost[name].CopyFrom(cost)
    service.node.leave()
    with Roles(tmp_path) as roles:
        for name in ("dear", "cheap"):
            told = ("--type", name, "--device", "cpu", "--units", "2", "--notice", "0")
            roles.start("workers.node", *told, "--scheduler", service.address)
        service.submit(made)
        wait_until(lambda: service.get("wrong").moves, "it moves", 200.0)
        (move,) = service.get("wrong").moves
        assert (move.reason, move.failed) == ("replanned", "")
        assert (move.before, move.after) == ("1 dear", "1 cheap")
        wait_until(lambda: service.get("wrong").step > move.step + 500, "it trains on", 200.0)
        status = service.stub.CancelJob(JobRequest(job_id="wrong"), timeout=60)
    assert (len(status.moves), status.attempt) == (1, 1), "it has learned, and stays"
    pids = steps_of(log_of(tmp_path, "wrong"))
    assert len(set(pids)) == 2
    assert pids == sorted(pids, key=pids.index), "no step under the plan before after the move"
