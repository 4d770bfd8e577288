"""Whoever watches a deadline has the job go over to units that stay while there is time."""

import time

import pytest

from protos.decision_pb2 import Decision
from protos.scheduler_pb2 import END_SUCCEEDED, JobRequest, JobStatus, Recovery
from scheduler import plan
from scheduler.runs.changes import guard as module
from scheduler.runs.changes.deadline import ENDING_S, sure_plan
from scheduler.runs.changes.guard import DeadlineGuard, may_go_over
from tests.scheduler.runs.changes.test_deadline import HOUR, decided, job, trained
from tests.scheduler.runs.survivors import Service
from tests.waiting import wait_until

KINDS = ("front", "back")


def test_the_guard_acts_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    decision = decided()
    told: list[Decision] = []
    status = trained(began_at=time.time(), samples=10)

    with DeadlineGuard(job(), decision, lambda: status, lambda: 1.0, told.append, 1.0):
        time.sleep(0.3)  # looks many times, and there is time
        assert not told
        status.began_at -= 1.2 * HOUR  # the rest takes at most an hour, and a tenth more
        wait_until(lambda: len(told) > 1)  # until it has gone over
    assert {stage.type for stage in told[0].stages} == {"cpu"}


def test_one_retry_is_kept_for_going_over() -> None:
    decision, status = decided(), trained()
    assert may_go_over(status, job(), decision)
    status.recoveries.extend([Recovery()] * 3)
    assert may_go_over(status, job(), decision)
    status.recoveries.append(Recovery())
    assert not may_go_over(status, job(), decision)
    assert not may_go_over(JobStatus(), job(), decision)
    split = job()
    split.train.split_experts = True
    assert not may_go_over(trained(), split, decision)


def test_without_a_deadline_or_with_units_that_stay_nothing_is_watched() -> None:
    sure = sure_plan(decided(), 2.0)
    assert sure is not None
    status = trained(began_at=1.0)
    for spec, decision in ((job(0.0), decided()), (job(), sure)):
        guard = DeadlineGuard(spec, decision, lambda: status, lambda: 1.0, lambda _: None, 1.0)
        with guard:
            assert guard._thread is None


@pytest.mark.exhaustive
def test_a_job_that_trains_goes_over_for_its_deadline(service: Service) -> None:
    spec = service.may_be_held("dated", **{"retries": 3, "train.max_steps": 300})
    schedule = spec.schedule
    front, back = (next(k for k in schedule.offered.types if k.name == n) for n in KINDS)
    back.interruptions_per_hour, back.recovery_s, back.price_per_hour = 0.1, 1.0, 0.01
    front.limit = 3
    head = schedule.given.layers[-1]
    head.cost["front"].CopyFrom(head.cost["back"])
    del schedule.pin[head.name]
    schedule.min_throughput = 0.0
    # Units that stay take 950 s for what the workload says, and a tenth more is within the time.
    sure = plan(
        schedule.given, schedule.offered, 1e9, "exact", pin=dict(schedule.pin), exclude=["back"]
    )
    seconds = schedule.given.samples / sure.max_throughput
    schedule.finish_by_hours = (1.1 * seconds + ENDING_S + 20.0) / 3600
    with service.held():
        service.submit(spec)
        wait_until(lambda: len(service.pids("dated")) > 4, "it is to train")
        decision = service.stub.GetDecision(JobRequest(job_id="dated"), timeout=20)
        assert {stage.type for stage in decision.stages} == set(KINDS), decision.reasons
        # It is due at the first look.
        wait_until(lambda: service.get("dated").moves, "it goes over")
    status = service.end("dated")
    assert status.end_reason == END_SUCCEEDED, status.reason
    (move,) = status.moves
    assert (move.reason, move.failed) == ("deadline", "")
    after = service.stub.GetDecision(JobRequest(job_id="dated"), timeout=20)
    assert {stage.type for stage in after.stages} == {"front"}
