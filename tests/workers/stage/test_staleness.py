"""The staleness bound against its definition, for any order of what happens."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.links.inbox import Stopped
from workers.stage.staleness import StalenessBound

LIMIT_S = 60.0  # only a hang reaches it
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["pulled", "acked"]), st.integers(0, 6)), st.just(("last", 0))
)


def passes(wait, step):
    """Whether a bound that was told to stop lets through at once, instead of waiting."""
    try:
        wait(step)
    except Stopped:
        return False
    return True


@given(st.integers(0, 3), st.booleans(), st.lists(EVENTS, max_size=12))
def test_lets_through_what_its_definition_allows(staleness, ordered, events):
    stop = threading.Event()
    stop.set()
    bound = StalenessBound(staleness, stop, ordered)
    pulled, acked, last = {-1}, {-1}, False
    for kind, step in [("", 0), *events]:
        if kind == "pulled":
            bound.pulled(step)
            pulled.add(step)
        elif kind == "acked":
            bound.acked(step)
            acked.add(step)
        elif kind == "last":
            bound.no_more_pulls()
            last = True
        for asked in range(12):
            assert passes(bound.before_pull, asked) == (max(acked) >= asked - 1 - staleness)
            free = not ordered or last or max(pulled) >= asked + staleness
            assert passes(bound.before_push, asked) == free


@pytest.mark.parametrize(
    ("wait", "event"), [("before_pull", "acked"), ("before_push", "pulled"), ("before_pull", "")]
)
def test_who_waits_is_woken(wait, event):
    stop = threading.Event()
    bound = StalenessBound(0, stop, ordered=True)
    ended, through = threading.Event(), []

    def work():
        through.append(passes(getattr(bound, wait), 1))
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not ended.wait(0.05)
    if event:
        getattr(bound, event)(1)
    else:
        stop.set()
    assert ended.wait(LIMIT_S)
    thread.join()
    assert through == [bool(event)]
