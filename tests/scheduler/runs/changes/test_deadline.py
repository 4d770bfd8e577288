"""A job with a deadline: what its plans are asked for, and when it goes over to sure units."""

from typing import Any

import pytest

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import Cut, JobStatus, ProgressReport
from scheduler import plan
from scheduler.replanning.measure import Filtered, Measurement
from scheduler.runs.changes.deadline import (
    ENDING_S,
    finish_at,
    hours_for_all,
    may_be_struck,
    seconds_left,
    slower,
    sure_plan,
)
from tests.scheduler.instances import cost, resources, workload

HOUR = 3600.0


def trained(**fields: Any) -> JobStatus:
    return JobStatus(retries=5, **fields)


def job(hours: float = 2.0) -> JobSpec:
    spec = JobSpec(name="job")
    spec.schedule.finish_by_hours = hours
    return spec


def decided(hours: float = 2.0) -> Decision:
    """Of 3.6 M samples, for which spot units are by far the cheapest."""
    offer = resources(cpu=(1.0, 40), spot=(0.1, 40))
    offer["types"][1].update(interruptions_per_hour=0.5, recovery_s=5.0)
    layer = {"cpu": cost(1.0), "spot": cost(1.0)}
    work = workload(layer, layer)
    return plan(work, offer, None, "exact", finish_by=hours).to_message()


def test_a_plan_is_asked_for_what_is_left_in_the_time_that_is_left() -> None:
    status = trained(began_at=1000.0)
    assert finish_at(status, job()) == 1000.0 + 2 * HOUR
    whole = hours_for_all(status, job(), 100.0, 1000.0)
    assert whole == pytest.approx(2 - ENDING_S / HOUR)
    status.from_samples = 75
    # A quarter is left, and an hour less what starting and saving takes.
    quarter = hours_for_all(status, job(), 100.0, 1000.0 + HOUR)
    assert quarter == 2.0  # no more than was asked for
    status.from_samples = 25
    rest = hours_for_all(status, job(), 100.0, 1000.0 + HOUR)
    assert rest == pytest.approx((1 - ENDING_S / HOUR) / 0.75)
    assert hours_for_all(status, job(), 100.0, 1000.0 + 3 * HOUR) == 2.0
    assert hours_for_all(status, job(0.0), 100.0, 1000.0) == 0.0


def test_the_plan_to_go_over_to_is_of_units_that_stay_and_faster_than_needed() -> None:
    decision = decided()
    assert may_be_struck(decision)
    sure = sure_plan(decision, 2.0)
    assert sure is not None
    assert {stage.type for stage in sure.stages} == {"cpu"}
    assert sure.throughput >= 2 * decision.workload.samples / (2 * HOUR) * (1 - 1e-9)
    assert not may_be_struck(sure)


def test_work_counts_from_the_last_cut() -> None:
    sure = sure_plan(decided(), 2.0)
    assert sure is not None
    status = trained(samples=3_000_000)  # trained, and not written anywhere
    assert seconds_left(status, sure) == pytest.approx(3.6e6 / sure.throughput)
    status.cuts.append(Cut(samples=1_800_000))
    assert seconds_left(status, sure) == pytest.approx(1.8e6 / sure.throughput)
    # The workload was given, and the data has twice as many.
    status.step, status.total_steps = 1000, 2400
    assert seconds_left(status, sure) == pytest.approx(5.4e6 / sure.throughput)


def test_a_job_that_is_slower_than_predicted_is_expected_to_stay_so() -> None:
    decision = decided()
    pace = 2.5 / decision.throughput
    measured = Measurement((), Filtered(20, pace, 0.0))
    assert slower(measured, decision, None) == pytest.approx(2.5)
    assert slower(Measurement((), Filtered(20, 0.1 * pace, 0.0)), decision, None) == 1.0
    assert slower(None, decision, ProgressReport(phase="start")) == 1.0
    # Validations took half as long as the steps between them.
    validated = ProgressReport(train_seconds=20.0, apart_s=10.0)
    assert slower(measured, decision, validated) == pytest.approx(1.5 * 2.5)
    assert slower(None, decision, validated) == pytest.approx(1.5)
