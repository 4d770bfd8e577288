"""What attempts trained, and what of it was lost, against a count step by step."""

import random

import pytest

from heterps.client.attempts import trained
from heterps.client.records import Job
from protos import scheduler_pb2 as pb


def job(spans: list[tuple[int, int]], ended: bool = True) -> Job:
    """Of attempts that trained from a step to another, a second a step, a minute between them."""
    status = pb.JobStatus(job_id="job", state=pb.SUCCEEDED if ended else pb.RUNNING)
    at = 1000.0
    for number, (first, last) in enumerate(spans, 1):
        began, at = at, at + last - first
        if number < len(spans):
            status.attempts.add(
                number=number,
                end_reason=pb.END_LOST_NODE,
                from_step=first,
                step=last,
                started_at=began,
                ended_at=at,
                price_per_hour=3600.0,
            )
            at += 60.0
        else:
            status.attempt, status.from_step, status.step = number, first, last
            status.started_at, status.ended_at = began, at
    return Job.of(status)


def counted(spans: list[tuple[int, int]]) -> list[int]:
    """The steps of each attempt that a later one trained again, one by one."""
    lost = [0] * len(spans)
    for number, (first, last) in enumerate(spans):
        for step in range(first, last):
            lost[number] += any(f <= step for f, _ in spans[number + 1 :])
    return lost


def test_what_is_lost_is_counted_once_whatever_attempts_began_with() -> None:
    draw = random.Random(4)
    for _ in range(200):
        spans, reached = [], [0]
        for _ in range(draw.randint(1, 6)):
            first = draw.choice(reached)
            last = first + draw.randint(0, 30)
            spans.append((first, last))
            reached = [cut for cut in reached if cut <= first] + [draw.randint(first, last)]
        made = trained(job(spans), 3600.0)
        assert [one.lost_steps for one in made] == counted(spans), spans
        assert [one.lost_s for one in made] == pytest.approx(counted(spans))
        assert [one.lost_cost for one in made] == pytest.approx(counted(spans))
        assert sum(one.seconds - one.lost_s for one in made) == pytest.approx(spans[-1][1])
        assert [one.away_s for one in made] == [60.0] * (len(spans) - 1) + [0.0]


def test_an_attempt_that_never_trained_lost_nothing_and_cost_nothing() -> None:
    status = pb.JobStatus(job_id="job", state=pb.QUEUED, attempt=1)
    status.attempts.add(number=1, end_reason=pb.END_NO_CAPACITY, ended_at=1e9)
    (one,) = trained(Job.of(status))
    assert (one.seconds, one.lost_s, one.cost, one.end_reason) == (0.0, 0.0, 0.0, "no_capacity")


def test_steps_that_an_attempt_itself_went_back_over_are_lost_too() -> None:
    status = pb.JobStatus(job_id="job", state=pb.SUCCEEDED, attempt=2, from_step=30, step=60)
    # It trained to 25 and went back to 20, to 40 and went back to 30, and died at 50.
    first = 25 + 20 + 20
    status.attempts.add(number=1, step=50, started_at=1000.0, ended_at=1000.0 + first)
    status.attempts[0].end_reason = pb.END_LOST_NODE
    for step, reached in ((20, 25), (30, 40)):
        status.recoveries.add(
            attempt=1, back=True, step=step, reached=reached, lost_s=reached - step
        )
    status.recoveries.add(attempt=1, step=22, reached=22)
    status.recoveries[0].price_per_hour = 3600.0
    status.started_at, status.ended_at = 2000.0, 2030.0
    found = Job.of(status)
    one, other = trained(found)
    assert (one.lost_steps, one.lost_s, one.seconds) == (5 + 10 + 20, 35.0, 65.0)
    assert (other.lost_steps, other.lost_s) == (0, 0.0)
    assert [r.lost_steps for r in found.recoveries] == [5, 10, 0]
    assert [r.lost_cost for r in found.recoveries] == [5.0, 0.0, 0.0]


def test_an_attempt_that_moved_costs_what_each_of_its_plans_did() -> None:
    status = pb.JobStatus(job_id="job", state=pb.SUCCEEDED, attempt=1, step=100)
    status.started_at, status.ended_at = 1000.0, 1100.0
    for at, before, failed in ((1030.0, 36.0, ""), (1050.0, 72.0, "no units"), (1080.0, 72.0, "")):
        status.moves.add(at=at, attempt=1, price_before=before, failed=failed)
    (one,) = trained(Job.of(status), 108.0)
    assert one.cost == pytest.approx((30 * 36 + 50 * 72 + 20 * 108) / 3600)
    assert one.price_per_hour == pytest.approx(3600 * one.cost / 100)
