"""Pulls whose keys go, and whose rows come, piece by piece, beside what pulls by gRPC bring."""

import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterps.home import certs
from ps import LocalShards, ParameterClient
from ps.client import pull, pull_in_pieces, session, streams
from ps.engine import _native
from ps.errors import ShardError
from ps.lines import frames
from ps.lines.stream import StreamLine
from ps.table.buckets import default_route

HERE = "127.0.0.1"
SPEC = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "uniform"}
rng = np.random.default_rng(3)
REPEATED = rng.choice(rng.integers(0, 2**63, 40_000), 70_001)
BATCHES = {
    "repeated": REPEATED,
    "distinct": rng.choice(1 << 40, 70_001, replace=False),
    "narrow": rng.integers(0, 90_000, 70_001),
    "one": np.full(40_000, 7),
    "late": np.concatenate([np.arange(60_000), [0, 1, 59_999, 1 << 50]]),
}


class Counted:
    """How many pulls came in pieces, and how many did not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = self.others = 0
        real = pull.pull_in_pieces

        def counted(*args: object) -> object:
            found = real(*args)  # type: ignore[arg-type]
            self.done += found is not None
            self.others += found is None
            return found

        monkeypatch.setattr(pull, "pull_in_pieces", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pieces_ask_for_each_key_once_and_spread_its_row(data: st.DataObject) -> None:
    few = st.integers(0, 30)
    keys = np.array(data.draw(st.lists(st.one_of(few, st.integers(0, 2**64 - 1)))), np.uint64)
    ends = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=4)))
    shards, dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 16, 40]))
    route = default_route(shards)
    pieces = _native.Pieces(keys, route, shards)
    asked = []
    for end in [*ends, len(keys)]:
        found = pieces.next(end)
        assert len(found) == shards
        for shard, some in enumerate(found):
            assert (route[_native.buckets_of(some)] == shard).all()
        asked.append(np.concatenate(found))
    distinct = np.concatenate(asked)
    assert sorted(distinct.tolist()) == sorted(set(keys.tolist()))
    assert pieces.asked == len(distinct)
    rows = (distinct % 9973).astype(np.float32)[:, None] + np.arange(dim, dtype=np.float32)
    straight = pieces.straight
    assert (distinct[:straight] == keys[:straight]).all()
    out = np.zeros((len(keys), dim), np.float32)
    out[:straight] = rows[:straight]
    rows[:straight] = np.nan  # they were never written there
    for begin, end in zip([0, *ends], [*ends, len(keys)], strict=True):
        pieces.spread(begin, end, rows, out, dim, data.draw(st.booleans()))
    expected = (keys % 9973).astype(np.float32)[:, None] + np.arange(dim, dtype=np.float32)
    np.testing.assert_array_equal(out, expected)


def test_pieces_come_one_after_the_other() -> None:
    keys = np.arange(10, dtype=np.uint64)
    pieces = _native.Pieces(keys, default_route(1), 1)
    pieces.next(5)
    for end in (4, 11):
        with pytest.raises(ValueError, match="one after the other"):
            pieces.next(end)
    rows = np.zeros((10, 2), np.float32)
    with pytest.raises(ValueError, match="not asked for"):
        pieces.spread(5, 6, rows, rows, 2, False)
    with pytest.raises(ValueError, match="room for rows"):
        pieces.spread(0, 5, rows, rows[:9], 2, False)
    with pytest.raises(ValueError, match="rows are missing"):
        pieces.spread(0, 5, rows[:4], rows, 2, False)
    with pytest.raises(ValueError, match="a shard that is not there"):
        _native.Pieces(keys, np.ones(_native.BUCKETS, np.uint16), 1)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dim", [1, 24])
@pytest.mark.parametrize("security", ["plain", "tls"])
def test_rows_are_those_that_come_by_grpc(
    shards: int,
    dim: int,
    security: str,
    counted: Counted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if security == "tls":
        certs.make(tmp_path, [HERE])
        for name, value in certs.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
    with (
        LocalShards(shards) as servers,
        ParameterClient(servers.addresses, shared_memory=False) as client,
        ParameterClient(servers.addresses, shared_memory=False, streams=False) as other,
    ):
        client.create_table("t", dim, **SPEC)
        client.push("t", REPEATED, rng.standard_normal((len(REPEATED), dim)).astype(np.float32))
        for name, keys in BATCHES.items():
            found = client.pull("t", keys)
            assert found.shape == (len(keys), dim)
            np.testing.assert_array_equal(found, other.pull("t", keys), err_msg=name)
        assert (counted.done, counted.others) == (len(BATCHES), len(BATCHES))


def test_what_does_not_fit_into_buffers(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are asked for until the shard waits for its replies to be taken, and takes no more."""
    monkeypatch.setattr(pull_in_pieces, "_PIECE", 500)
    monkeypatch.setattr(pull_in_pieces, "_WIDE", 512)
    taken = []
    real = pull_in_pieces._Pull._ask

    def watched(self: pull_in_pieces._Pull, *args: object) -> None:
        before = len(self._waiting)
        real(self, *args)  # type: ignore[arg-type]
        taken.append(len(self._waiting) <= before)

    monkeypatch.setattr(pull_in_pieces._Pull, "_ask", watched)
    keys = np.arange(60_000) + (1 << 40)
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
        ParameterClient(shards.addresses, shared_memory=False, streams=False) as other,
    ):
        client.create_table("t", 128, **SPEC)
        client.pull("t", keys[:1])
        (line,) = client.session().shards[0]._streams._free  # type: ignore[union-attr]
        for way in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            line._socket.setsockopt(socket.SOL_SOCKET, way, 1 << 17)
        np.testing.assert_array_equal(client.pull("t", keys), other.pull("t", keys))
    assert counted.done == 1
    assert any(taken), "nothing stood in its way"


class _Door:
    """Lets so many bytes of a shard's replies through, then nothing, or ends the connection."""

    def __init__(self, port: int, most: int, then: str) -> None:
        self._target, self._most, self._then = port, most, then
        self._listening = socket.create_server((HERE, 0))
        self.port = self._listening.getsockname()[1]
        self.passed = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection((HERE, self._target))
            for args in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=args, daemon=True).start()

    def _pass(self, here: socket.socket, there: socket.socket, counts: bool) -> None:
        try:
            while some := here.recv(1 << 16):
                if counts and self.passed + len(some) > self._most:
                    there.sendall(some[: self._most - self.passed])
                    self.passed = self._most
                    if self._then == "end":
                        there.shutdown(socket.SHUT_RDWR)
                        here.shutdown(socket.SHUT_RDWR)
                    return
                self.passed += counts * len(some)
                there.sendall(some)
        except OSError:
            return

    def close(self) -> None:
        self._listening.close()


@pytest.mark.parametrize("then", ["end", "nothing"])
@pytest.mark.parametrize("most", [14, 1_900_000])
def test_a_way_that_ends_or_stalls_in_the_middle(
    then: str, most: int, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = []

    def through(host: str, port: int, secret: bytes, **how: float) -> StreamLine:
        doors.append(_Door(port, most, then))
        return StreamLine(host, doors[-1].port, secret, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "StreamLine", through)
    keys = REPEATED
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, timeout_s=8, shared_memory=False) as client,
        ParameterClient(shards.addresses, shared_memory=False, streams=False) as other,
    ):
        other.create_table("t", 16, **SPEC)
        began = time.monotonic()
        found = client.pull("t", keys)
        took = time.monotonic() - began
        np.testing.assert_array_equal(found, other.pull("t", keys))
        assert took < 8 + 1, "half of the time is for the stream, half for gRPC"
        assert counted.done == 0
        assert doors
        np.testing.assert_array_equal(client.pull("t", keys[:100]), found[:100])
    for door in doors:
        door.close()


def test_what_a_shard_refuses_is_said(counted: Counted) -> None:
    with (
        LocalShards(2) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
        ParameterClient(shards.addresses, shared_memory=False) as other,
    ):
        other.create_table("t", 8, **SPEC)
        client.pull("t", REPEATED)
        other.drop_tables("t")
        with pytest.raises(ShardError, match=r"refused Pull of .* rows of 't'"):
            client.pull("t", REPEATED)
        other.create_table("u", 8, **SPEC)
        assert client.pull("u", REPEATED).shape == (len(REPEATED), 8)
    assert (counted.done, counted.others) == (2, 1)


def test_replies_that_are_none(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of another table's row makes the pull go another way."""
    real = StreamLine.finish

    def other(self: StreamLine, room: memoryview, until: float) -> bytes:
        head = bytearray(real(self, room, until))
        head[1] ^= 1
        return bytes(head)

    monkeypatch.setattr(StreamLine, "finish", other)
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
        ParameterClient(shards.addresses, shared_memory=False, streams=False) as by_grpc,
    ):
        client.create_table("t", 8, **SPEC)
        np.testing.assert_array_equal(client.pull("t", REPEATED), by_grpc.pull("t", REPEATED))
    assert counted.done == 0


def test_many_threads_pull_and_push(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is one of those that it had: no two pulls have each other's."""
    monkeypatch.setattr(streams, "_MOST", 3)
    keys = np.arange(50_000)
    wrong: list[object] = []
    with (
        LocalShards(2) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
    ):
        client.create_table("t", 4, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        ones = np.full((len(keys), 4), -1, np.float32) * (keys[:, None] % 7 + 1)

        def pulls(seed: int) -> None:
            mine = np.random.default_rng(seed).choice(keys, 40_000)
            try:
                for _ in range(10):
                    rows = client.pull("t", mine)
                    times = rows / (mine[:, None] % 7 + 1)
                    if not ((times == times.round()) & (times <= 5)).all():
                        wrong.append(rows)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=pulls, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            client.push("t", keys, ones)
        for thread in threads:
            thread.join(120)
        assert not wrong
        np.testing.assert_array_equal(client.pull("t", keys), -5 * ones)
    assert counted.done > 0


def test_a_sending_goes_on_where_it_stopped() -> None:
    here, there = socket.socketpair()
    with here, there:
        body = np.random.default_rng(0).bytes(3 << 20)
        sending = frames.Sending(here, 3, body)
        assert not sending.go_on()
        found = bytearray()
        while not sending.go_on():
            found += there.recv(1 << 20)
        here.shutdown(socket.SHUT_WR)
        while some := there.recv(1 << 20):
            found += some
    assert found[:1] == b"\3"
    assert int.from_bytes(found[1:9], "big") == len(body)
    assert found[9:] == body
