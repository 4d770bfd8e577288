"""What an hour in training has cost a job before the plan, or attempt, that it has."""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.scheduler_pb2 import JobStatus, Move


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Training of one attempt under one plan.

    Attributes:
        price_per_hour: dollars.
        seconds: that it took.
        first, last: steps that were over when it began, and when it ended.
    """

    price_per_hour: float
    seconds: float
    first: int
    last: int


def price_before(status: JobStatus, otherwise: float) -> float:
    """Dollars an hour, a mean over the time that went into the steps before the latest stretch.

    A step that was trained again counts where it was trained last.

    Args:
        otherwise: where none of them is known, as those of another job.
    """
    before: list[_Stretch] = []
    for one in status.attempts:
        if not one.started_at:
            continue
        left, began, first = _left(status.moves, one.number, one.started_at, one.from_step)
        last = _Stretch(one.price_per_hour, one.ended_at - began, first, one.step)
        before += [*left, last]
    left, _, kept = _left(status.moves, status.attempt, status.started_at, status.from_step)
    before += left
    cost = seconds = 0.0
    for stretch in reversed(before):
        steps = max(0, min(stretch.last, kept) - stretch.first)
        if steps:
            part = stretch.seconds * steps / (stretch.last - stretch.first)
            cost, seconds = cost + stretch.price_per_hour * part, seconds + part
        kept = min(kept, stretch.first)
    return cost / seconds if seconds > 0 else otherwise


def _left(
    moves: Iterable[Move], attempt: int, began: float, first: int
) -> tuple[list[_Stretch], float, int]:
    """Stretches of an attempt that moves have ended; when, and after which step, the next began."""
    found: list[_Stretch] = []
    for move in moves:
        if move.attempt == attempt and not move.failed:
            found.append(_Stretch(move.price_before, move.at - began, first, move.step))
            began, first = move.at + move.seconds, move.step
    return found, began, first
