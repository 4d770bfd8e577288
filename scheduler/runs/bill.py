"""What an hour in training has cost a job, before its latest workers were told to go on and since.

Units that workers share are paid once.
"""

from dataclasses import dataclass

from protos.scheduler_pb2 import JobStatus
from protos.shares import less_an_hour


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Training of one attempt under one plan.

    Attributes:
        price_per_hour: dollars, a mean.
        seconds: that it took.
        first, last: steps that were over when it began, and when it ended.
    """

    price_per_hour: float
    seconds: float
    first: int
    last: int


def price_before(status: JobStatus, price_per_hour: float) -> float:
    """Dollars an hour, a mean over the time that went into the steps before the latest stretch.

    A step that was trained again counts where it was trained last.

    Args:
        price_per_hour: of the plan that it has; taken as well where none of the steps is known, as
            those of another job.
    """
    before: list[_Stretch] = []
    for one in status.attempts:
        if not one.started_at:
            continue
        left, began, first = _left(status, one.number, one.started_at, one.from_step)
        last = _stretch(status, one.price_per_hour, began, one.ended_at, first, one.step)
        before += [*left, last]
    left, began, kept = _left(status, status.attempt, status.started_at, status.from_step)
    before += left
    if (last_began := _began(status, began)) > began:
        step = status.recoveries[-1].step
        before.append(_stretch(status, price_per_hour, began, last_began, kept, step))
        kept = step
    cost = seconds = 0.0
    for stretch in reversed(before):
        steps = max(0, min(stretch.last, kept) - stretch.first)
        if steps:
            part = stretch.seconds * steps / (stretch.last - stretch.first)
            cost, seconds = cost + stretch.price_per_hour * part, seconds + part
        kept = min(kept, stretch.first)
    return cost / seconds if seconds > 0 else price_per_hour


def price_since(status: JobStatus, price_per_hour: float, now: float) -> float:
    """Dollars an hour, a mean over the latest stretch.

    Args:
        price_per_hour: of the plan that it has.
        now: seconds since the epoch.
    """
    _, began, _ = _left(status, status.attempt, status.started_at, status.from_step)
    return price_per_hour - less_an_hour(status.shares, _began(status, began), now)


def _began(status: JobStatus, began: float) -> float:
    """When the latest workers of an attempt were told to go on, whose plan began at some time."""
    last = status.recoveries[-1] if status.recoveries else None
    if last is None or last.attempt != status.attempt:
        return began
    return max(began, last.at + last.seconds)


def _left(
    status: JobStatus, attempt: int, began: float, first: int
) -> tuple[list[_Stretch], float, int]:
    """Stretches of an attempt that moves have ended; when, and after which step, the next began."""
    found: list[_Stretch] = []
    for move in status.moves:
        if move.attempt == attempt and not move.failed:
            found.append(_stretch(status, move.price_before, began, move.at, first, move.step))
            began, first = move.at + move.seconds, move.step
    return found, began, first


def _stretch(
    status: JobStatus, price: float, began: float, ended: float, first: int, last: int
) -> _Stretch:
    price -= less_an_hour(status.shares, began, ended)
    return _Stretch(price, ended - began, first, last)
