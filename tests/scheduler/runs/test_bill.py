"""What training cost before the plan that a job has: each step as it was trained last."""

import random

import pytest

from protos.scheduler_pb2 import JobStatus
from scheduler.runs.bill import price_before, price_since


@pytest.mark.parametrize("seed", range(60))
def test_every_step_counts_by_the_plan_that_trained_it_last(seed: int) -> None:
    """Against a ledger of all steps, over random attempts that begin again and move."""
    draw = random.Random(seed)
    status = JobStatus()
    clock, price = 1000.0, 0.0
    ledger: dict[int, tuple[float, float]] = {}  # by step: seconds, dollars an hour
    reached = first = 0
    attempts = draw.randint(1, 4)
    for number in range(1, attempts + 1):
        clock += draw.uniform(1, 50)
        first = draw.randint(0, reached)
        started, begun, step = clock, first, first
        moves = draw.randint(0, 2)
        for nth in range(moves + 1):
            price = draw.choice([0.5, 2.0, 10.0])
            pace = draw.uniform(0.1, 3.0)
            latest = number == attempts and nth == moves
            for _ in range(0 if latest else draw.randint(1, 30)):
                step, clock = step + 1, clock + pace
                ledger[step] = pace, price
            reached = max(reached, step)
            if nth < moves:
                failed = status.moves.add(attempt=number, at=clock - 0.01, step=step)
                failed.price_before, failed.failed = 1000.0, "no units"
                move = status.moves.add(attempt=number, at=clock, step=step, price_before=price)
                move.seconds = draw.uniform(0.5, 5.0)
                clock += move.seconds
                first = step
        if number < attempts:
            ended = status.attempts.add(number=number, from_step=begun, step=step)
            ended.started_at, ended.ended_at, ended.price_per_hour = started, clock, price
            reached = step
        else:
            status.attempt, status.started_at, status.from_step = number, started, begun
    kept = [ledger[step] for step in range(1, first + 1)]
    seconds = sum(one for one, _ in kept)
    expected = sum(one * at for one, at in kept) / seconds if seconds else 7.0
    assert price_before(status, 7.0) == pytest.approx(expected)


def test_an_attempt_that_did_not_come_to_train_counts_nothing() -> None:
    status = JobStatus(attempt=2, started_at=50.0, from_step=10)
    status.attempts.add(number=1, ended_at=40.0, price_per_hour=99.0)
    assert price_before(status, 1.5) == 1.5


def test_a_unit_that_two_workers_share_is_paid_once() -> None:
    status = JobStatus(attempt=2, started_at=200.0, from_step=10)
    # Of the first attempt's 100 s, 40 are with a unit less; of the 50 s up to a move, 20 are.
    status.attempts.add(number=1, step=10, started_at=50.0, ended_at=150.0, price_per_hour=5.0)
    status.shares.add(at=90.0, until=130.0, attempt=1, price_per_hour=2.0)
    status.shares.add(at=230.0, until=260.0, attempt=2, price_per_hour=1.0)
    status.moves.add(attempt=2, at=250.0, seconds=10.0, step=30, price_before=3.0)
    first, second = 5.0 - 2.0 * 0.4, 3.0 - 1.0 * 0.4
    expected = (100 * first + 50 * second) / 150
    assert price_before(status, 9.0) == pytest.approx(expected)
    # From 260 on, with one that is shared still; then workers are replaced at step 40.
    status.shares.add(at=280.0, attempt=2, price_per_hour=4.0)
    assert price_since(status, 9.0, 300.0) == pytest.approx(9.0 - 4.0 * 20 / 40)
    status.recoveries.add(attempt=2, at=319.0, seconds=1.0, step=40)
    third = 9.0 - 4.0 * 40 / 60
    expected = (100 * first + 50 * second + 60 * third) / 210
    assert price_before(status, 9.0) == pytest.approx(expected)
    assert price_since(status, 9.0, 330.0) == pytest.approx(9.0 - 4.0)
