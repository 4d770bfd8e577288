"""Every push exactly once, against a model that keeps everything it has heard."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ps.engine import _native
from ps.errors import ConflictError, OutdatedError
from ps.shard.exactly_once import ExactlyOnce, Seen
from ps.table.applied import AppliedWindow, PushId

WIDTH = _native.WINDOW
PUSHES = st.builds(
    PushId,
    st.sampled_from(["a", "b"]),
    st.integers(1, 3),
    st.one_of(st.integers(1, 12), st.integers(WIDTH - 3, WIDTH + 12), st.just(5 * WIDTH)),
)


@dataclass
class Client:
    """What the model knows of one."""

    epoch: int = 0
    highest: int = 0
    heard: set[int] = field(default_factory=set)  # applied or in flight


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pushes = ExactlyOnce()
        self.clients: dict[str, Client] = {}
        self.in_flight: list[PushId] = []
        self.ends: dict[str, tuple[int, int]] = {}
        self.positions: dict[str, tuple[int, int]] = {}

    def expected(self, push: PushId) -> Seen | type[Exception]:
        client = self.clients.setdefault(push.client, Client())
        if push.epoch < client.epoch:
            return ConflictError
        if push.epoch > client.epoch:
            client.epoch, client.highest, client.heard = push.epoch, 0, set()
        if client.highest - push.sequence >= WIDTH:
            return OutdatedError
        client.highest = max(client.highest, push.sequence)
        if push in self.in_flight and push.sequence in client.heard:
            return Seen.IN_FLIGHT
        return Seen.APPLIED if push.sequence in client.heard else Seen.NEW

    def seen(self, push: PushId, *, begin: bool) -> Seen | type[Exception]:
        try:
            return self.pushes.begin(push) if begin else self.pushes.look(push)
        except (ConflictError, OutdatedError) as error:
            return type(error)

    @rule(push=PUSHES)
    def begin(self, push: PushId) -> None:
        expected = self.expected(push)
        assert self.seen(push, begin=True) == expected
        if expected is Seen.NEW:
            self.clients[push.client].heard.add(push.sequence)
            self.in_flight.append(push)

    @rule(push=PUSHES)
    def look(self, push: PushId) -> None:
        assert self.seen(push, begin=False) == self.expected(push)

    @rule(at=st.integers(0, 9), more=st.integers(0, 3), told=st.booleans())
    def commit(self, at: int, more: int, told: bool) -> None:
        if at >= len(self.in_flight):
            return
        push = self.in_flight.pop(at)
        self.pushes.commit(push, push.sequence + more, str(push[1:]) if told else "")
        end = (push.epoch, push.sequence + more)
        self.ends[push.client] = max(self.ends.get(push.client, end), end)
        if told:
            self.positions[push.client] = max(self.positions.get(push.client, (0, 0)), push[1:])

    @rule(at=st.integers(0, 9))
    def abort(self, at: int) -> None:
        if at >= len(self.in_flight):
            return
        push = self.in_flight.pop(at)
        self.pushes.abort(push)
        client = self.clients[push.client]
        if client.epoch == push.epoch:
            client.heard.discard(push.sequence)

    @rule()
    def restart(self) -> None:
        """Another shard takes over what a save, and what a log's first record, would say."""
        for push in self.in_flight:
            self.pushes.abort(push)
            if self.clients[push.client].epoch == push.epoch:
                self.clients[push.client].heard.discard(push.sequence)
        self.in_flight = []
        other = ExactlyOnce()
        other.merge(AppliedWindow.of(window.message) for window in self.pushes.windows())
        other.merge(self.pushes.ends())
        other.take_positions(self.pushes.positions())
        self.pushes = other

    @invariant()
    def agrees(self) -> None:
        told = {}
        for window in self.pushes.windows():
            told[window.client] = (window.epoch, window.highest, window.sequences().tolist())
            epoch, end = self.ends.get(window.client, (0, 0))
            assert window.end == (end if epoch == window.epoch else 0)
        assert told == {
            name: (
                c.epoch,
                c.highest,
                sorted(s for s in c.heard if c.highest - s < WIDTH),
            )
            for name, c in self.clients.items()
        }
        assert {w.client: (w.epoch, w.end) for w in self.pushes.ends()} == self.ends
        assert {p.client: p.position for p in self.pushes.positions()} == {
            client: str(at) for client, at in self.positions.items()
        }


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


def test_merging_knows_what_either_knew() -> None:
    ours, theirs = ExactlyOnce(), ExactlyOnce()
    for pushes, sequences in ((ours, (1, 2, 5)), (theirs, (2, 3, WIDTH + 2))):
        for sequence in sequences:
            push = PushId("a", 1, sequence)
            assert pushes.begin(push) is Seen.NEW
            pushes.commit(push, sequence, "")
    ours.merge(theirs.windows())
    (window,) = ours.windows()
    assert window.sequences().tolist() == [3, 5, WIDTH + 2]
    assert window.end == WIDTH + 2
    with pytest.raises(OutdatedError):
        ours.begin(PushId("a", 1, 2))


def test_many_bring_the_same_push() -> None:
    """One applies it; when that fails another one does; the rest come back once it is applied."""
    pushes = ExactlyOnce()
    push = PushId("a", 1, 1)
    together = threading.Barrier(8)

    def bring(number: int) -> str:
        together.wait(30)
        while True:
            match pushes.begin(push):
                case Seen.APPLIED:
                    return "came again"
                case Seen.IN_FLIGHT:
                    pushes.wait(push)
                case Seen.NEW if failures:
                    failures.pop()
                    pushes.abort(push)
                    return "failed"
                case Seen.NEW:
                    pushes.commit(push, 1, "")
                    return "applied"

    failures = [1, 2]
    with ThreadPoolExecutor(8) as pool:
        outcomes = Counter(pool.map(bring, range(8)))
    assert outcomes == {"applied": 1, "failed": 2, "came again": 5}
    pushes.wait(push)  # nothing is in flight
