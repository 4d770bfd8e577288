"""What computes `nn.Linear` is chosen once: no death and no resumed job changes a bit by it."""

import os
import signal
from types import SimpleNamespace

import pytest

from protos.decision_pb2 import Decision, LinearRoute, Workload
from protos.job_pb2 import JobSpec, Origin
from protos.scheduler_pb2 import END_SUCCEEDED, JobRequest
from scheduler.service.moving import given
from tests.scheduler.runs.survivors import SHAPE, Service
from tests.waiting import wait_until
from workers.ops.linear import ONEDNN, available

needs_onednn = pytest.mark.skipif(ONEDNN not in available(), reason="torch without oneDNN")
pytest.importorskip("workers.stage")


def routes(service: Service, way: str = ONEDNN) -> list[LinearRoute]:
    """All products of the job's two layers go one way."""
    width = int(service.job("any").model.args["width"])
    ways = {"forward": way, "grad_input": way, "grad_weight": way, "threads": 1}
    return [
        LinearRoute(type="front", rows=16, inputs=8, outputs=width, **ways),  # type: ignore[arg-type]
        LinearRoute(type="back", rows=16, inputs=width, outputs=1, **ways),  # type: ignore[arg-type]
    ]


def routed(service: Service, name: str, **overrides: object) -> JobSpec:
    spec = service.job(name, **overrides)
    spec.schedule.given.linear.extend(routes(service))
    spec.retries = 1
    return spec


@pytest.mark.exhaustive
@needs_onednn
def test_replaced_workers_and_resumed_jobs_compute_as_the_first_ones_did(
    service: Service, unfailed: str
) -> None:
    whole = service.submit(routed(service, "routed", **{"train.checkpoint.every": "9 steps"}))
    status = service.end(whole)
    assert status.end_reason == END_SUCCEEDED, status.reason
    expected = service.digest(whole)
    assert expected != unfailed  # other sums: the routes were taken

    killed = service.submit(routed(service, "routed-killed"))
    wait_until(lambda: service.get(killed).step >= 4, "it trains")
    os.kill(service.pids(killed)["stage 0 worker 1"], signal.SIGKILL)
    assert service.end(killed).end_reason == END_SUCCEEDED
    assert len(service.get(killed).recoveries) == 1
    assert service.digest(killed) == expected

    cut = status.cuts[0]
    assert 0 < cut.step < SHAPE.steps
    resumed = service.job("routed-resumed")
    resumed.train.resume.CopyFrom(
        Origin(job_id=whole, step=cut.step, place=cut.place, samples=cut.samples)
    )
    service.submit(resumed)  # its own costs say nothing of routes
    status = service.end(resumed.name)
    assert status.end_reason == END_SUCCEEDED, status.reason
    decision = service.stub.GetDecision(JobRequest(job_id=resumed.name), timeout=20)
    assert list(decision.workload.linear) == routes(service)
    assert service.digest(resumed.name) == expected


def test_a_route_that_a_machine_lacks_ends_the_job_and_is_named(service: Service) -> None:
    spec = service.job("unroutable")
    spec.schedule.given.linear.extend(routes(service, "abacus"))
    service.submit(spec)
    status = service.end(spec.name)
    assert status.end_reason != END_SUCCEEDED
    assert "'abacus', which PyTorch" in status.reason
    assert "train.linear: torch" in status.reason


@needs_onednn
def test_who_does_without_has_pytorchs_own_bits(service: Service, unfailed: str) -> None:
    spec = routed(service, "unrouted", **{"train.linear": "torch"})
    service.submit(spec)
    assert service.end(spec.name).end_reason == END_SUCCEEDED
    assert service.digest(spec.name) == unfailed


def test_a_plan_to_move_to_does_not_change_what_was_chosen() -> None:
    def one(kind: str, way: str) -> LinearRoute:
        return LinearRoute(type=kind, rows=1, forward=way)

    before = Decision(workload=Workload(linear=[one("a", "onednn")]))
    plan = Decision(workload=Workload(linear=[one("a", "torch"), one("b", "onednn")]))
    made = given(SimpleNamespace(decision=before), plan)  # type: ignore[arg-type]
    assert list(made.workload.linear) == [one("a", "onednn"), one("b", "onednn")]
