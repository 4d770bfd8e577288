"""A job goes over to another plan by itself where its key says so, and what was measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.decision_pb2 import LayerCost
from protos.job_pb2 import JobSpec
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import JobRequest
from scheduler.runs import watch
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
