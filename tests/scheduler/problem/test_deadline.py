"""The guard of a deadline: whatever is taken away and whenever, the job is done in time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.problem.deadline import Deadline

# A job of `work` samples on spot units (`spot` samples/s) until the guard says otherwise, then on
# sure ones. Times are whole ticks of a second; `every` between two looks.
LOSSES = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 400)), max_size=60)


def done_at(
    deadline: Deadline,
    work: float,
    spot: float,
    sure: float,
    slower: float,
    cut_every: int,
    losses: list[tuple[int, int]],
) -> float:
    """When it ends; `losses` are when all is lost back to the last cut, and for how long it stands.

    The sure units are `slower` times as slow as planned, and going over takes all of `moving_s`.
    """
    strikes: dict[int, int] = {}
    for at, stands in losses:
        strikes[at] = max(strikes.get(at, 0), stands)
    done = cut = 0.0
    stands_until = 0
    every = int(deadline.every_s)
    for now in range(100_000):
        if now % every == 0 and not deadline.may_stay(now, (work - cut) / sure):
            # Whatever was trained since the cut is lost at the worst moment.
            return now + deadline.moving_s + (work - cut) / sure * slower
        if now in strikes:
            done, stands_until = cut, max(stands_until, now + strikes[now])
        if now < stands_until:
            continue
        done += spot
        if done >= work:
            return now + 1
        if now % cut_every == 0:
            cut = done
    return math.inf


@given(
    work=st.integers(1, 20_000),
    spot=st.floats(0.0, 50.0),
    sure=st.floats(0.5, 50.0),
    slower=st.floats(0.1, 1.1),
    cut_every=st.integers(1, 2000),
    moving_s=st.integers(1, 300),
    every_s=st.integers(1, 60),
    spare=st.floats(0.0, 3000.0),
    losses=LOSSES,
)
def test_no_trace_of_interruptions_misses_the_deadline(
    work: int,
    spot: float,
    sure: float,
    slower: float,
    cut_every: int,
    moving_s: int,
    every_s: int,
    spare: float,
    losses: list[tuple[int, int]],
) -> None:
    least = work / sure * 1.1 + moving_s + every_s
    deadline = Deadline(least + spare, moving_s, every_s)
    assert deadline.may_stay(0, work / sure * (1 - 1e-12))
    ended = done_at(deadline, work, spot, sure, slower, cut_every, losses)
    assert ended <= deadline.at * (1 + 1e-9)


def test_it_stays_as_long_as_the_rest_allows_and_no_longer() -> None:
    deadline = Deadline(at=1000.0, moving_s=30.0, every_s=2.0, margin=1.25)
    # 400 s of work: 500 with the margin, 30 to move, 2 to the next look.
    assert deadline.may_stay(1000 - 532, 400)
    assert not deadline.may_stay(1000 - 531.9, 400)
    # Where it is looked at all the time, until sure units alone would be late.
    always = replace(deadline, every_s=0.0)
    assert always.may_stay(1000 - 530, 400)
    assert not always.may_stay(1000 - 529.9, 400)


@pytest.mark.parametrize("late", [0.0, 10.0, 1e6])
def test_past_the_deadline_it_goes_over(late: float) -> None:
    assert not Deadline(100.0, 5.0).may_stay(100.0 + late, 0.0)
