"""Every push exactly once, against a model that keeps everything it has heard."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.engine import _native
from ps.errors import ConflictError, OutdatedError
from ps.server import maintenance
from ps.shard.directory import ShardDirectory
from ps.shard.exactly_once import FORGET_S, LATE_S, ExactlyOnce, Seen
from ps.shard.push import ReceivedPush, take_apart
from ps.shard.state import ShardState, now_s
from ps.table.applied import AppliedWindow, PushId
from ps.table.spec import make_spec
from tests.waiting import wait_until

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
        self.pushes.commit(push, push.sequence + more, str(push[1:]) if told else "", 1)
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
        # Of the others all was refused, and nothing is kept.
        self.clients = {name: c for name, c in self.clients.items() if name in self.ends}
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
            if name in self.ends or name in {push.client for push in self.in_flight}
        }
        assert {w.client: (w.epoch, w.end) for w in self.pushes.ends()} == self.ends
        assert {p.client: p.position for p in self.pushes.positions()} == {
            client: str(at) for client, at in self.positions.items()
        }


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestModel = Model.TestCase


def test_merging_knows_what_either_knew() -> None:
    ours, theirs = ExactlyOnce(), ExactlyOnce()
    for pushes, sequences in ((ours, (1, 2, 5)), (theirs, (2, 3, WIDTH + 2))):
        for sequence in sequences:
            push = PushId("a", 1, sequence)
            assert pushes.begin(push) is Seen.NEW
            pushes.commit(push, sequence, "", 1)
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
                    pushes.commit(push, 1, "", 1)
                    return "applied"

    failures = [1, 2]
    with ThreadPoolExecutor(8) as pool:
        outcomes = Counter(pool.map(bring, range(8)))
    assert outcomes == {"applied": 1, "failed": 2, "came again": 5}
    pushes.wait(push)  # nothing is in flight


def _applied(pushes: ExactlyOnce, client: str, sequence: int, time_s: int) -> None:
    push = PushId(client, 1, sequence)
    assert pushes.begin(push) is Seen.NEW
    pushes.commit(push, sequence, f"{client} at {sequence}", time_s)


def test_who_is_silent_for_a_day_is_forgotten() -> None:
    pushes = ExactlyOnce()
    _applied(pushes, "early", 1, 1000)
    _applied(pushes, "late", 1, 1000)
    _applied(pushes, "late", 2, 1000 + FORGET_S)
    assert pushes.begin(PushId("early", 1, 7)) is Seen.NEW  # in flight
    assert pushes.forget(1000 + FORGET_S) == []
    pushes.abort(PushId("early", 1, 7))
    assert pushes.forget(999 + FORGET_S) == []
    assert pushes.forget(1000 + FORGET_S) == ["early"]
    assert [w.client for w in pushes.windows()] == ["late"]
    assert [w.client for w in pushes.ends()] == ["late"]
    assert pushes.look(PushId("late", 1, 1)) is Seen.APPLIED
    assert pushes.look(PushId("late", 1, 2)) is Seen.APPLIED
    # A reader's place is a few bytes, and training may rest for longer.
    assert sorted(p.client for p in pushes.positions()) == ["early", "late"]


def test_when_a_client_was_heard_goes_with_its_window() -> None:
    first, second = ExactlyOnce(), ExactlyOnce()
    _applied(first, "a", 1, 5000)
    second.merge([AppliedWindow.of(window.message) for window in first.windows()])
    assert [w.heard_s for w in second.windows()] == [5000]
    assert second.forget(5000 + FORGET_S) == ["a"]
    # Of windows that do not say so, silence begins when they are taken.
    second.merge([replace(window, heard_s=0) for window in first.windows()])
    assert second.forget(5000 + FORGET_S) == []
    assert second.look(PushId("a", 1, 1)) is Seen.APPLIED


def _push(client: str, sequence: int, made_s: int) -> ReceivedPush:
    head = pb.PushRequest(
        table="t", dim=1, count=1, client=client, epoch=1, sequence=sequence, made_s=made_s
    )
    payload = np.array([5], np.uint64).tobytes() + np.array([-1], np.float32).tobytes()
    return take_apart(head, memoryview(payload), pack(head, payload))


@pytest.fixture
def state() -> ShardState:
    made = ShardState()
    made.create(make_spec("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    return made


def _value(state: ShardState) -> float:
    return float(state.find("t", 1).native.pull(np.array([5], np.uint64), True)[0, 0])


def test_a_push_that_comes_after_its_client_was_forgotten_is_refused(state: ShardState) -> None:
    """It may have been applied; those that are made later are new."""
    day = 1_700_000_000
    assert state.push(_push("a", 1, day), day)
    assert state.pushes.forget(day + FORGET_S) == ["a"]
    with pytest.raises(OutdatedError, match="not known"):
        state.push(_push("a", 1, day), day + FORGET_S)
    assert _value(state) == 1
    assert state.push(_push("a", 2, day + FORGET_S), day + FORGET_S)
    assert _value(state) == 2


def test_a_clock_that_was_ahead_for_a_while_makes_no_push_new(state: ShardState) -> None:
    day = 1_700_000_000
    assert state.push(_push("a", 1, day), day)
    assert state.pushes.forget(day + 2 * FORGET_S) == ["a"]
    with pytest.raises(OutdatedError, match="not known"):
        state.push(_push("a", 1, day), day + 90)
    assert _value(state) == 1
    assert state.push(_push("a", 2, day + 90), day + 90)


def test_more_clients_than_are_remembered_are_never_forgotten_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who were silent for longest go; what they send again is refused, also later on."""
    monkeypatch.setattr("ps.shard.exactly_once._MOST_CLIENTS", 8)
    monkeypatch.setattr("ps.shard.exactly_once._LET_GO", 3)
    start = now_s()
    spec = make_spec("t", 1, optimizer="sgd", initializer="zeros", durability="log")
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(spec)
    for client in range(9):
        assert state.push(_push(str(client), 1, start + 100 * client), start)
    for again in range(3):
        for client in range(9):
            push = _push(str(client), 1, start)
            if client < 3:
                with pytest.raises(OutdatedError, match="not known"):
                    state.push(push, start)
            else:
                assert not state.push(push, start)
        if again == 1:
            durable.fold()
        durable.close()
        state = ShardState()
        durable = ShardDirectory(state, tmp_path)
    assert state.push(_push("8", 2, start), start), "who is remembered goes on"
    assert state.push(_push("new", 1, start + 100), start + 100)
    durable.close()


def test_who_repeats_changes_forgets_as_whoever_made_them(state: ShardState) -> None:
    """A log, or a replica: an epoch that begins anew is none that is over."""
    day = 1_700_000_000
    later = day + FORGET_S
    changes = [(_push("a", 7, 0), day), (_push("a", 7, 0), later), (_push("b", 7, 0), later)]
    for push, time_s in changes:
        state.pushes.forget(time_s)
        assert state.push(push, time_s)
    repeated = ShardState()
    repeated.create(state.tables["t"].spec)
    for push, time_s in changes:
        assert repeated.push(push, time_s, journal=False)
    assert repeated.pushes.windows() == state.pushes.windows()
    assert _value(repeated) == _value(state) == 3


@pytest.mark.parametrize("off_s", [-LATE_S - 1, LATE_S + 1])
def test_an_old_push_that_is_remembered_was_applied(state: ShardState, off_s: int) -> None:
    """Clocks that differ by half a day could hide how old one is: they are told."""
    now = 1_700_000_000
    assert state.push(_push("a", 1, now), now)
    assert not state.push(_push("a", 1, now), now + off_s)  # came again
    with pytest.raises(OutdatedError, match="clocks"):
        state.push(_push("a", 2, now), now + off_s)
    assert state.push(_push("a", 2, 0), now)  # of a client that does not say
    assert _value(state) == 2


def test_a_shard_forgets_by_itself(state: ShardState, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its saves do not grow with every client that ever was."""
    now = now_s()
    for i in range(50):
        assert state.push(_push(f"client {i}", 1, 0), now - FORGET_S - i)
    assert state.push(_push("alive", 1, 0), now)
    assert len(state.applied().windows) == 51
    monkeypatch.setattr(maintenance, "_EXPIRY_S", 0.0)
    keeper = maintenance.Maintenance(state, None)
    try:
        wait_until(lambda: len(state.pushes.windows()) == 1, "they are forgotten")
    finally:
        keeper.close()
    assert [w.client for w in state.applied().windows] == ["alive"]
    assert _value(state) == 51
