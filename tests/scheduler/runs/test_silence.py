"""Who is taken to stand still, and who is not."""

import pytest

from scheduler.runs import silence
from scheduler.runs.silence import SILENT_S, Silence


class Clock:
    """As `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(silence, "time", clock)
    return clock


def look(one: Silence, clock: Clock, seconds: float, done: tuple[tuple[int, int], ...] = ()):
    """Look five times a second for so long; what was found at last."""
    found = []
    for _ in range(round(seconds * 5)):
        clock.now += 0.2
        found = one.look(done)
    return found


def test_who_tells_nothing_for_a_minute_stands_still(clock: Clock) -> None:
    one = Silence()
    one.hear((0, 0))
    one.hear((1, 0))
    for _ in range(int(SILENT_S / 2)):
        assert look(one, clock, 2.0) == []
        one.hear((0, 0))
    assert look(one, clock, 1.0) == [(1, 0)]
    one.hear((1, 0))
    assert look(one, clock, 1.0) == []


def test_who_never_told_anything_or_has_trained_is_not_missed(clock: Clock) -> None:
    one = Silence()
    assert look(one, clock, 2 * SILENT_S) == []
    one.hear((0, 0))
    assert look(one, clock, 2 * SILENT_S, done=((0, 0),)) == []
    one.forget()
    assert look(one, clock, 2 * SILENT_S) == []


def test_a_scheduler_that_stood_still_itself_misses_nobody(clock: Clock) -> None:
    one = Silence()
    one.hear((0, 0))
    clock.now += 1e4
    assert one.look(()) == []
    assert look(one, clock, SILENT_S / 2) == []
