"""The stream that bulk bytes take between hosts."""

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from chassis.channels import connect
from chassis.refusal import Refusing
from chassis.sealed import Sealed
from chassis.security import Security
from chassis.servers import TENSOR_BYTES
from heterps.home import certs
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from protos.parameter_server_pb2_grpc import ParameterServerStub
from ps import LocalShards, ParameterClient
from ps.client import session, streams
from ps.lines import stream
from ps.lines.calls import BrokenLineError, RefusedError
from ps.lines.stream import StreamLine, StreamServer
from tests.ps.killed import push_while_killed
from tests.waiting import wait_until

HERE = "127.0.0.1"
TABLE = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
BEGUN = threading.Event()
END = threading.Event()


def _echo(request: bytes, context: Refusing) -> bytes:
    if request == b"no":
        context.abort(grpc.StatusCode.ABORTED, "moved – elsewhere")
    if request == b"active":
        return bytes([context.is_active()])
    if request == b"wait":
        BEGUN.set()
        assert END.wait(30)
    return request


@pytest.fixture(params=["plain", "tls"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StreamServer]:
    if request.param == "tls":
        _secure(tmp_path, monkeypatch)
    BEGUN.clear()
    END.clear()
    made = StreamServer([_echo, lambda request, _: request[::-1]], HERE, threads=4)
    yield made
    END.set()
    made.close()


def _secure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make(folder, [HERE])
    for name, value in certs.environment(folder).items():
        monkeypatch.setenv(name, value)


def _line(server: StreamServer) -> StreamLine:
    return StreamLine(HERE, server.port, server.secret)


def test_messages_of_any_size_and_refusals(server: StreamServer) -> None:
    line = _line(server)
    for size in (0, 1, 16_384, 16_385, 1 << 20, (9 << 20) + 7):
        sent = np.random.default_rng(size).bytes(size)
        assert line.call(0, sent, 30) == sent
        assert bytes(line.call(1, sent, 30)) == sent[::-1]
    assert line.call(0, b"active", 30) == b"\1"
    for method, request, code, text in (
        (0, b"no", grpc.StatusCode.ABORTED, "moved – elsewhere"),
        (9, b"one", grpc.StatusCode.UNIMPLEMENTED, "no such method"),
    ):
        with pytest.raises(RefusedError, match=text) as refused:
            line.call(method, request, 30)
        assert refused.value.code() is code
    assert line.call(0, b"after", 30) == b"after"
    line.close()


def test_a_deadline_breaks_the_line(server: StreamServer) -> None:
    line = _line(server)
    with pytest.raises(BrokenLineError, match=r"within 0\.1 s"):
        line.call(0, b"wait", 0.1)
    line.close()


def test_only_who_knows_the_secret_is_let_in(server: StreamServer) -> None:
    for secret in (bytes(32), bytes([server.secret[0] ^ 1]) + server.secret[1:]):
        with pytest.raises(OSError, match=r"let this client not in|[Cc]onnection|reset|EOF"):
            StreamLine(HERE, server.port, secret)
    assert _line(server).call(0, b"still", 30) == b"still"


def test_what_is_too_long_is_refused_by_its_length(server: StreamServer) -> None:
    line = _line(server)
    line._socket.sendall(struct.pack("!BQ", 0, TENSOR_BYTES + 1))
    status, size = struct.unpack("!BQ", line._socket.recv(9))
    assert status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert b"expected at most" in line._socket.recv(size)
    assert line._socket.recv(1) == b""
    assert _line(server).call(0, b"still", 30) == b"still"


def test_the_end_lets_calls_under_way_finish(server: StreamServer) -> None:
    line, idle = _line(server), _line(server)
    replies: list[bytes] = []
    thread = threading.Thread(target=lambda: replies.append(bytes(line.call(0, b"wait", 30))))
    thread.start()
    assert BEGUN.wait(30)
    threading.Timer(0.2, END.set).start()  # once it is being closed
    server.close(30.0)
    thread.join()
    assert replies == [b"wait"]
    with pytest.raises(BrokenLineError):
        idle.call(0, b"more", 5)
    with pytest.raises(OSError, match=r"refused|reset"):
        _line(server)


def test_tls_is_of_version_1_3_and_no_one_comes_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _secure(tmp_path, monkeypatch)
    server = StreamServer([_echo], HERE, threads=4)
    try:
        line = _line(server)
        assert isinstance(line._socket, Sealed)
        assert line._socket.version() == "TLSv1.3"
        with pytest.raises(OSError):  # noqa: PT011 - the handshake fails, or the connection ends
            StreamLine(HERE, server.port, server.secret, Security())
        old = ssl.create_default_context(cafile=str(tmp_path / certs.CA))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection((HERE, server.port), 5) as bare,
            pytest.raises(ssl.SSLError),
        ):
            old.wrap_socket(bare, server_hostname=HERE)
        certs.make(tmp_path / "other", [HERE])
        other = Security(authority=(tmp_path / "other" / certs.CA).read_bytes())
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            StreamLine(HERE, server.port, server.secret, other)
        assert line.call(0, b"still", 30) == b"still"
    finally:
        server.close()


def test_without_the_token_nobody_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _secure(tmp_path, monkeypatch)
    with LocalShards(1) as shards:
        address = shards.addresses[0]
        with connect(address) as channel:
            told = ParameterServerStub(channel).Attach(pb.AttachRequest(), timeout=10)
        assert told.stream_port
        known = Security.from_environment()
        with (
            connect(address, Security(authority=known.authority)) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            ParameterServerStub(channel).Attach(pb.AttachRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(OSError, match=r"let this client not in|[Cc]onnection|reset|EOF"):
            StreamLine(HERE, told.stream_port, bytes(32))
        with ParameterClient(shards.addresses, shared_memory=False) as client:
            client.create_table("t", 2, **TABLE)
            client.push("t", [1], np.float32([[-1, -2]]))
            assert client.pull("t", [1]).tolist() == [[1, 2]]
            assert _streams_of(client)


def _streams_of(client: ParameterClient) -> int:
    """How many streams a client holds now, to all shards."""
    found = [shard._streams for shard in client.session().shards]
    return sum(len(each._lines) for each in found if each is not None)


@pytest.mark.parametrize("dim", [1, 16])
def test_rows_are_the_same_by_every_way(dim: int) -> None:
    """Pushes and steps by each way, beside sums that NumPy makes."""
    rng = np.random.default_rng(5)
    ways = {
        "near": {},
        "stream": {"shared_memory": False},
        "grpc": {"shared_memory": False, "streams": False},
    }
    with LocalShards(2) as shards:
        clients = {name: ParameterClient(shards.addresses, **how) for name, how in ways.items()}
        expected = np.zeros((5000, dim), np.float32)
        for name, client in clients.items():
            client.create_table(name, dim, **TABLE)
        for step in range(1, 5):
            keys = rng.integers(0, 5000, 20_000)
            grads = rng.integers(-4, 5, (20_000, dim)).astype(np.float32)
            np.subtract.at(expected, keys, grads)
            for name, client in clients.items():
                if step % 2:
                    client.push(name, keys, grads)
                    continue
                client.stage_async(name, step, 0, {name: (keys, grads)}).result(30)
                client.tally(name, step, 1)
                client.commit_async(name, step, 1).result(30)
        for name, client in clients.items():
            for writer in ways:
                found = client.pull(writer, np.arange(5000))
                np.testing.assert_array_equal(found, expected, err_msg=f"{writer} by {name}")
        assert _streams_of(clients["stream"]) >= 2
        assert _streams_of(clients["grpc"]) == 0
        for client in clients.values():
            client.close()


class _Wall:
    """Takes connections and says nothing: what a stream sends stays there."""

    def __init__(self) -> None:
        self._listening = socket.create_server((HERE, 0))
        self.port = self._listening.getsockname()[1]
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.recv(32)
            connection.sendall(b"\0")
            self.taken.append(connection)

    def close(self) -> None:
        self._listening.close()
        for connection in self.taken:
            connection.close()


def test_a_stream_that_stalls_falls_back_and_applies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = _Wall()
    monkeypatch.setattr(
        session, "StreamLine", lambda host, port, secret, **how: StreamLine(host, wall.port, secret)
    )
    keys = np.arange(30_000)
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, timeout_s=4, shared_memory=False) as client,
    ):
        client.create_table("t", 16, **TABLE)
        client.push("t", keys, np.full((len(keys), 16), -1, np.float32))
        assert wall.taken
        assert (client.pull("t", keys) == 1).all()
        assert len(wall.taken) == 1  # it is not tried again for a while
    wall.close()


def test_a_stream_that_is_refused_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr(
        session, "StreamLine", lambda host, _, secret, **how: StreamLine(host, port, secret)
    )
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
    ):
        client.create_table("t", 2, **TABLE)
        client.push("t", [1], np.float32([[-1, -2]]))
        assert client.pull("t", [1]).tolist() == [[1, 2]]
        assert _streams_of(client) == 0


def test_more_calls_at_once_than_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST", 2)
    keys = np.arange(2000)
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, shared_memory=False) as client,
    ):
        client.create_table("t", 4, **TABLE)
        ones = np.full((len(keys), 4), -1, np.float32)
        for future in [client.push_async("t", keys, ones) for _ in range(40)]:
            future.result(60)
        assert (client.pull("t", keys) == 40).all()
        assert _streams_of(client) <= 2


def test_a_shard_that_dies_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_PAUSE_S", "_AWAY_S"):
        monkeypatch.setattr(streams, pause, 0.0)
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, timeout_s=30, shared_memory=False) as client,
    ):
        client.create_table("t", 2, durability="log", **TABLE)
        keys = np.arange(20_000)
        pushed = push_while_killed(shards, client, keys, 2)
        assert (client.pull("t", keys) == pushed).all()
        assert _streams_of(client) > 0


def test_what_came_by_a_stream_is_not_applied_again_by_grpc() -> None:
    """A push that came by a stream, and comes again by gRPC, is known by its name."""
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("t", 1, **TABLE)
        shard = client.session().shards[0]
        head = pb.PushRequest(table="t", dim=1, count=1, client="me", epoch=7, sequence=3)
        request = pack(head, np.uint64([5]), np.float32([-1]))
        first = pb.PushReply.FromString(bytes(shard.push(request, "Push")))
        with connect(shards.addresses[0]) as channel:
            call = channel.unary_unary("/heterps.v1.ParameterServer/Push")
            second = pb.PushReply.FromString(call(request, timeout=10))
        assert (first.applied, second.applied) == (True, False)
        assert client.pull("t", [5])[0, 0] == 1


def test_clients_that_stall_in_a_message_hold_nobody_back(server: StreamServer) -> None:
    """More of them than there are turns, and none of them is waited for."""
    stalled = [_line(server) for _ in range(12)]
    for line in stalled:
        line._socket.sendall(struct.pack("!BQ", 0, 1 << 20) + b"begun")
    line = _line(server)
    sent = bytes(1 << 19)
    for _ in range(3):
        assert line.call(0, sent, 30) == sent
    for each in stalled:
        each.close()


def test_whoever_sends_too_slowly_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SILENCE_S", 0.2)
    server = StreamServer([_echo], HERE, threads=4)
    try:
        line = _line(server)
        line._socket.settimeout(30)
        line._socket.sendall(struct.pack("!BQ", 0, 1000))

        def trickle() -> None:  # never silent for long
            for _ in range(1000):
                line._socket.sendall(b"x")
                time.sleep(0.01)

        with pytest.raises(OSError, match=r"[Pp]ipe|reset|EOF|closed"):
            trickle()
        idle = _line(server)
        time.sleep(0.5)
        assert idle.call(0, b"later", 30) == b"later"  # silence between messages is no matter
        time.sleep(0.5)
        assert idle.call(0, b"again", 30) == b"again"
    finally:
        server.close()


def test_nobody_has_more_than_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond it are not let in; those that were there are not cut off."""
    monkeypatch.setattr(stream, "_SHARE", 3)
    monkeypatch.setattr(stream, "is_loopback", lambda host: False)
    server = StreamServer([_echo], HERE, threads=4)
    try:
        lines = [_line(server) for _ in range(3)]
        with pytest.raises(OSError, match=r"let this client not in|reset"):
            _line(server)
        for line in lines:
            assert line.call(0, b"still", 30) == b"still"
        lines.pop().close()
        wait_until(lambda: len(server._open) < 3, "one has left", 30.0)
        assert _line(server).call(0, b"instead", 30) == b"instead"
    finally:
        server.close()


@pytest.mark.parametrize(
    "reply",
    [
        struct.pack("!BQ", 0, 1 << 62),
        struct.pack("!BQ", 0, TENSOR_BYTES + 1),
        struct.pack("!BQ", 5, 4) + b"\xff{]x",
        struct.pack("!BQ", 5, 4) + b"[1] ",
        struct.pack("!BQ", 5, 2) + b"17",
        struct.pack("!BQ", 0, 8) + b"half",
        b"\0\0",
        b"",
    ],
)
def test_replies_that_are_none_break_the_line(reply: bytes) -> None:
    with socket.create_server((HERE, 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(32)
                connection.sendall(b"\0")
                connection.recv(100)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        line = StreamLine(HERE, listening.getsockname()[1], bytes(32))
        with pytest.raises(BrokenLineError):
            line.call(0, b"ask", 30)
        line.close()
        thread.join()


def test_a_reply_that_trickles_is_not_waited_for() -> None:
    with socket.create_server((HERE, 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(32)
                connection.sendall(b"\0")
                connection.recv(100)
                connection.sendall(struct.pack("!BQ", 0, 1 << 20))
                while True:
                    connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        line = StreamLine(HERE, listening.getsockname()[1], bytes(32))
        began = time.monotonic()
        with pytest.raises(BrokenLineError):
            line.call(0, b"ask", 0.3)
        assert time.monotonic() - began < 20
        line.close()
        thread.join()


def test_a_shard_on_the_same_port_with_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_AWAY_S", 0.0)
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    with (
        LocalShards(1, options=("--stream-port", str(port))) as shards,
        ParameterClient(shards.addresses, timeout_s=30, shared_memory=False) as client,
    ):
        client.create_table("t", 1, durability="log", **TABLE)
        client.push("t", [1], np.float32([[-1]]))
        before = client.session().shards[0]._streams
        assert before is not None
        assert before.open
        old = client.session().shards[0].stub.Attach(pb.AttachRequest(), timeout=10)
        assert old.stream_port == port
        shards.restart(0)
        client.push("t", [1], np.float32([[-1]]))
        with pytest.raises(OSError, match=r"let this client not in|reset|closed"):
            StreamLine(HERE, port, old.stream_secret)
        wait_until(lambda: bool(client.pull("t", [1])[0, 0] == 2 and before.open), "again", 30.0)
        assert client.pull("t", [1])[0, 0] == 2


def test_a_child_makes_its_own_and_leaves_its_parents() -> None:
    with LocalShards(1) as shards:
        client = ParameterClient(shards.addresses, shared_memory=False)
        client.create_table("t", 1, **TABLE)
        client.push("t", [1], np.float32([[-1]]))
        (mine,) = client.session().shards[0]._streams._free  # type: ignore[union-attr]
        pid = os.fork()
        if pid == 0:  # it closes what it inherited, and opens nothing
            client.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        client.push("t", [1], np.float32([[-1]]))
        assert client.session().shards[0]._streams._free == [mine]  # type: ignore[union-attr]
        assert client.pull("t", [1])[0, 0] == 2
        client.close()
