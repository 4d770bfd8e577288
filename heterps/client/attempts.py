"""What each attempt at a job trained, and what of that was lost when it ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from heterps.client.records import Job
from protos.shares import less_an_hour


@dataclass(frozen=True, slots=True)
class Trained:
    """One attempt, as far as it trained.

    Attributes:
        number: of the attempt, from 1.
        end_reason: empty while it goes on.
        from_step, step: where it began, and what it had come to.
        seconds: in training; 0 where it did not come so far.
        lost_steps: that were trained again, by it or a later attempt.
        lost_s: seconds in training that went into these.
        away_s: seconds from its end until the next attempt trained; 0 where none has.
        price_per_hour: dollars, of its plans by the time they had; 0 where that is unknown.
    """

    number: int
    end_reason: str
    from_step: int
    step: int
    seconds: float
    lost_steps: int
    lost_s: float
    away_s: float
    price_per_hour: float

    @property
    def cost(self) -> float:
        """Dollars for its time in training."""
        return self.seconds * self.price_per_hour / 3600

    @property
    def lost_cost(self) -> float:
        """Dollars for what was lost."""
        return self.lost_s * self.price_per_hour / 3600


def trained(job: Job, price_per_hour: float = 0.0) -> Sequence[Trained]:
    """All attempts at a job, the latest last.

    Args:
        price_per_hour: of the latest one's plan.
    """
    spans = [(one.number, one.end_reason, one.from_step, one.step) for one in job.attempts]
    times = [(one.started_at, one.ended_at, one.price_per_hour) for one in job.attempts]
    if job.attempt > len(job.attempts):
        spans.append((job.attempt, job.end_reason, job.from_step, job.step))
        times.append((job.started_at, job.ended_at or time.time(), price_per_hour))
    made: list[Trained] = []
    kept = spans[-1][3] if spans else 0  # steps that no later attempt trained again
    began = 0.0
    for (number, reason, first, step), (started, ended, price) in zip(
        reversed(spans), reversed(times), strict=True
    ):
        seconds = max(0.0, ended - started) if started else 0.0
        lost = max(0, step - max(first, min(step, kept)))
        share = lost / (step - first) if step > first else float(bool(made))
        away_s = max(0.0, began - ended) if began else 0.0
        back = [one for one in job.recoveries if one.back and one.attempt == number]
        back_s = min(seconds, sum(one.lost_s for one in back))
        lost_s = back_s + share * (seconds - back_s)
        lost += sum(one.lost_steps for one in back)
        mean = _mean_price(job, number, started, started + seconds, price)
        made.append(Trained(number, reason, first, step, seconds, lost, lost_s, away_s, mean))
        kept, began = min(kept, first), started or began
    return made[::-1]


def _mean_price(job: Job, attempt: int, started: float, ended: float, last: float) -> float:
    """Dollars an hour over the time of an attempt, which may have moved; its last plan's known."""
    cost, began = 0.0, started
    for move in job.moves:
        if move.attempt == attempt and not move.failed and began < move.at < ended:
            cost += move.price_before * (move.at - began)
            began = move.at
    mean = (cost + last * (ended - began)) / (ended - started) if began > started else last
    return mean - less_an_hour(job.shares, started, ended)
