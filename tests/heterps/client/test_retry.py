"""How long a scheduler that is followed may be away."""

import pytest

from heterps.client.retry import AWAY_S, Retry
from heterps.errors import UnknownJobError, UnreachableError


def away():
    return UnreachableError("nobody answers")


def test_it_ends_half_a_minute_after_the_last_answer(clock):
    retry = Retry(clock=clock)
    for _ in range(2):
        retry.succeeded()
        retry.failed(away())
        clock.now += AWAY_S - 0.1
        retry.failed(away())
    clock.now += 0.2
    with pytest.raises(UnreachableError):
        retry.failed(away())


def test_what_is_no_absence_ends_it_at_once(clock):
    with pytest.raises(UnknownJobError):
        Retry(clock=clock).failed(UnknownJobError("no such job"))
    with pytest.raises(UnreachableError):
        Retry(0.0, clock).failed(away())
