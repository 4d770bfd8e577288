"""The order of pulls and commits against its definition, for any order of what is told."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.stage_pb2 import COMMITTED, PULLED, Notice
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import NoticeBoard, Notices
from workers.links.pipeline import Place
from workers.stage.steps.schedule import Schedule
from workers.stage.steps.staleness import RowOrder

LIMIT_S = 60.0  # only a hang reaches it
STEPS, WIDTH = 6, 2


def order_of(staleness, micro_batches=3, first=0):
    """The order of a leader of two workers, which is told of the other."""
    stop = threading.Event()
    inbox = Inbox(stop)
    board = NoticeBoard(inbox.wake)
    schedule = Schedule(STEPS, lambda step: 8, micro_batches)
    place = Place(0, 0, (WIDTH,))
    notices = Notices((0, 0), [["nowhere", "nowhere"]], board)
    return RowOrder(place, schedule, staleness, first, notices, inbox), notices, stop


def passes(wait, step):
    """Whether an order that was told to stop lets through at once, instead of waiting."""
    try:
        wait(step)
    except Stopped:
        return False
    return True


def tell(order, notices, kind, rank, step):
    """Worker `rank` tells the leader."""
    others = Notices((0, rank), [["nowhere"] * WIDTH], notices.board)
    if rank:
        others.board.put(_notice(kind, rank, step))
    else:
        others.tell((0, 0), kind, step)


def _notice(kind, rank, step):
    return Notice(kind=kind, step=step, stage=0, rank=rank)


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from([PULLED, COMMITTED]), st.integers(0, 1), st.integers(0, 7)),
        max_size=14,
    ),
)
def test_lets_through_what_its_definition_allows(staleness, micro_batches, events):
    order, notices, stop = order_of(staleness, micro_batches)
    stop.set()
    pulled, committed = set(), set()
    for kind, rank, step in [(None, 0, 0), *events]:
        if kind == PULLED:
            tell(order, notices, PULLED, rank, step)
            pulled.add((rank, step))
        elif kind == COMMITTED:
            tell(order, notices, COMMITTED, 0, step)
            committed.add(step)
        for asked in range(STEPS):
            seen = asked - 1 - staleness
            assert passes(order.wait_to_pull, asked) == (seen < 0 or seen in committed)
            # Commits come in order, so that each has but one more step to wait for than the last.
            first = asked + staleness if asked else 0
            free = all(
                len({rank for rank, step in pulled if step == later})
                >= sum(_computes(later, rank, micro_batches) for rank in range(WIDTH))
                for later in range(first, min(asked + staleness + 1, STEPS))
            )
            assert passes(order.wait_to_commit, asked) == free


def _computes(step, rank, micro_batches):
    return any((step * micro_batches + index) % WIDTH == rank for index in range(micro_batches))


@pytest.mark.parametrize("event", ["committed", "stop"])
def test_who_waits_to_pull_is_woken(event):
    order, notices, stop = order_of(0)
    ended, through = threading.Event(), []

    def work():
        through.append(passes(order.wait_to_pull, 1))
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not ended.wait(0.05)
    if event == "committed":
        tell(order, notices, COMMITTED, 0, 0)
    else:
        stop.set()
    assert ended.wait(LIMIT_S)
    thread.join()
    assert through == [event == "committed"]


def test_after_the_last_pull_commits_wait_for_none():
    order, _, stop = order_of(1)
    stop.set()
    assert not passes(order.wait_to_commit, 0)
    order.no_more_pulls()
    assert passes(order.wait_to_commit, 0)


def test_no_commit_comes_before_the_pulls_of_the_first_steps():
    order, notices, stop = order_of(2, micro_batches=1)  # worker 1 computes step 1 alone
    stop.set()
    for step in (0, 2):
        tell(order, notices, PULLED, 0, step)
    assert not passes(order.wait_to_commit, 0)
    tell(order, notices, PULLED, 1, 1)
    assert passes(order.wait_to_commit, 0)
