"""Threads that must not end: what a step raises ends a round and no more."""

import threading
from collections.abc import Callable

import pytest

from chassis.loops import FAMILIES, Loop, Loops, for_each
from chassis.metrics import Metrics
from tests.waiting import wait_until


class Step:
    """Counts its rounds and fails as it is told."""

    def __init__(self) -> None:
        self.rounds = 0
        self.error: BaseException | None = None
        self.pause_s: float | None = None

    def __call__(self) -> float | None:
        self.rounds += 1
        if self.error is not None:
            raise self.error
        return self.pause_s

    def more(self, count: int = 1) -> Callable[[], bool]:
        """Whether that many more rounds have begun."""
        until = self.rounds + count
        return lambda: self.rounds >= until


def test_a_step_that_fails_is_counted_told_and_made_again() -> None:
    told: list[list[str]] = []
    loops = Loops(lambda: told.append(loops.failing))
    step, other = Step(), Step()
    loop = loops.start("one", step, 0.01)
    loops.start("other", other, 0.01)
    wait_until(step.more())
    assert (loop.failures, loops.failing, told) == (0, [], [])
    step.error = KeyError("unexpected")
    wait_until(lambda: loop.failures == 3)
    assert loops.failing == ["one"]
    wait_until(other.more(3), "the others go on")
    step.error = None
    wait_until(lambda: not loops.failing)
    assert told == [["one"], []]
    failures = loop.failures
    wait_until(step.more(3))
    assert loop.failures == failures
    loops.close()


def test_an_expected_error_is_no_failure() -> None:
    loops, step = Loops(), Step()
    loop = loops.start("one", step, 0.01, expected=(OSError,))
    step.error = ConnectionError("away")
    wait_until(step.more(2))
    assert (loop.failures, loops.failing) == (0, [])
    loops.close()


def test_a_step_says_when_the_next_one_is_and_a_kick_brings_it_on() -> None:
    loops, step = Loops(), Step()
    step.pause_s = 600.0
    loop = loops.start("one", step, 0.01)
    wait_until(step.more())
    for _ in range(3):
        more = step.more()
        loop.kick()
        wait_until(more)
    loops.close()
    rounds = step.rounds
    loop.kick()
    assert step.rounds == rounds


def test_pauses_grow_while_it_fails_and_not_for_ever() -> None:
    step = Step()
    step.error = RuntimeError("unexpected")
    loop = Loop("one", step, 0.1)
    pauses = [loop._round() for _ in range(12)]
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert pauses[-1] == 5.0
    step.error = None
    assert loop._round() == 0.1


def test_it_may_be_closed_from_its_own_thread() -> None:
    loops, ended = Loops(), threading.Event()

    def step() -> None:
        loops.close()
        ended.set()

    loops.start("one", step, 0.01)
    assert ended.wait(60)


def test_a_round_that_does_not_end_is_told_and_its_end_too() -> None:
    told: list[list[str]] = []
    loops = Loops(lambda: told.append(loops.failing), hangs_s=0.2)
    goes_on = threading.Event()
    loop = loops.start("one", lambda: goes_on.wait() and None, 0.01)
    other = Step()
    loops.start("other", other, 0.01)
    wait_until(lambda: loops.failing == ["one"])
    wait_until(other.more(3), "the others go on")
    goes_on.set()
    wait_until(lambda: not loops.failing)
    assert told == [["one"], []]
    assert loop.failures == 0
    loops.close()


def test_metrics_show_each_loop() -> None:
    from prometheus_client import generate_latest

    loops, step = Loops(), Step()
    step.error = ValueError("unexpected")
    metrics = Metrics()
    metrics.collect(FAMILIES, loops.samples)
    loop = loops.start("one", step, 0.01)
    wait_until(lambda: loop.failures == 2)
    loops.close()
    shown = generate_latest(metrics.registry).decode()
    assert f'heterps_loop_failures_total{{loop="one"}} {loop.failures}.0' in shown
    assert 'heterps_loop_failing{loop="one"} 1.0' in shown


def test_one_item_that_fails_keeps_no_other_waiting() -> None:
    done: list[int] = []

    def act(item: int) -> None:
        if item % 2:
            raise ValueError(item)
        if item == 8:
            raise OSError("for all")
        done.append(item)

    with pytest.raises(ExceptionGroup) as raised:
        for_each(range(5), act)
    assert done == [0, 2, 4]
    assert [str(error) for error in raised.value.exceptions] == ["1", "3"]
    with pytest.raises(OSError, match="for all"):
        for_each(range(7, 11), act, at_once=(OSError,))
    assert done == [0, 2, 4]
