"""The Unix socket that messages of one host take."""

import socket
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from chassis.refusal import Refusing, reason_of, refuse
from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import MEMORY_NOT_ATTACHED, REASON_UNSPECIFIED
from ps import LocalShards, ParameterClient
from ps.errors import NotAttachedError
from ps.lines.calls import BrokenLineError, RefusedError
from ps.shm.line import MAX_MESSAGE, UnixLine, UnixServer
from ps.shm.region import Region, Regions
from tests.ps.killed import push_while_killed
from tests.waiting import wait_until

TABLE = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}


BEGUN = threading.Event()  # a call that waits is under way
END = threading.Event()  # of its waiting


def _echo(request: bytes, context: Refusing) -> bytes:
    if request == b"no":
        context.abort(grpc.StatusCode.ABORTED, "moved – elsewhere")
    if request == b"why":
        refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "whatever", MEMORY_NOT_ATTACHED)
    if request == b"bug":
        raise KeyError("a bug")
    if request == b"wait":
        BEGUN.set()
        assert END.wait(30)
    return request


@pytest.fixture
def server() -> Iterator[UnixServer]:
    BEGUN.clear()
    END.clear()
    made = UnixServer([_echo, lambda request, _: request[::-1]], Regions())
    made.start()
    yield made
    END.set()
    made.close()


def _line(server: UnixServer) -> UnixLine:
    return UnixLine(server.name, server.secret)


def test_calls_and_refusals(server: UnixServer) -> None:
    line = _line(server)
    assert line.call(0, b"one", 5) == b"one"
    assert line.call(1, b"one", 5) == b"eno"
    long = bytes(MAX_MESSAGE - 1)
    assert line.call(0, long, 5) == long
    for request, method, code, text in (
        (b"no", 0, grpc.StatusCode.ABORTED, "moved – elsewhere"),
        (b"bug", 0, grpc.StatusCode.INTERNAL, "a bug"),
        (b"one", 9, grpc.StatusCode.UNIMPLEMENTED, "no such method"),
        (bytes(MAX_MESSAGE + 100), 0, grpc.StatusCode.UNIMPLEMENTED, "too long"),
    ):
        with pytest.raises(RefusedError, match=text) as refused:
            line.call(method, request, 5)
        assert refused.value.code() is code
        assert reason_of(refused.value) == REASON_UNSPECIFIED
    with pytest.raises(RefusedError) as refused:
        line.call(0, b"why", 5)
    assert reason_of(refused.value) == MEMORY_NOT_ATTACHED
    assert line.call(0, b"", 5) == b""
    line.close()


def test_lines_do_not_wait_for_each_other(server: UnixServer) -> None:
    slow, quick = _line(server), _line(server)
    replies: list[bytes] = []
    thread = threading.Thread(target=lambda: replies.append(slow.call(0, b"wait", 30)))
    thread.start()
    assert BEGUN.wait(30)
    assert quick.call(0, b"now", 30) == b"now"
    assert not replies
    END.set()
    thread.join()
    assert replies == [b"wait"]


def test_a_deadline_ends_a_call(server: UnixServer) -> None:
    line = _line(server)
    with pytest.raises(RefusedError) as refused:
        line.call(0, b"wait", 0.1)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    line.close()


def test_a_silent_shard_is_not_waited_for_at_the_door() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("")  # any abstract name
        silent.listen()
        name = silent.getsockname()[1:].decode()
        with pytest.raises(TimeoutError):
            UnixLine(name, bytes(32), timeout_s=0.1)


def test_only_who_knows_the_secret_is_let_in(server: UnixServer) -> None:
    for secret in (b"", b"x", bytes(32), server.secret[:-1]):
        with pytest.raises(OSError, match=r"let this client not in|[Cc]onnection|reset"):
            UnixLine(server.name, secret or b"\0")
    assert _line(server).call(0, b"still", 5) == b"still"
    with pytest.raises(OSError, match="refused"):
        UnixLine("heterps-" + "0" * 32, server.secret)


def test_the_end_lets_calls_under_way_finish(server: UnixServer) -> None:
    line, idle = _line(server), _line(server)
    replies: list[bytes] = []
    thread = threading.Thread(target=lambda: replies.append(line.call(0, b"wait", 30)))
    thread.start()
    assert BEGUN.wait(30)
    name = server.name
    threading.Timer(0.2, END.set).start()  # once it is being closed
    server.close(30.0)
    thread.join()
    assert replies == [b"wait"]
    with pytest.raises(BrokenLineError):
        idle.call(0, b"more", 5)
    with pytest.raises(OSError, match="refused"):
        UnixLine(name, server.secret)


def test_memory_is_shared_as_long_as_its_connection() -> None:
    regions = Regions()
    server = UnixServer([_echo], regions)
    server.start()
    shared = [Region(100) for _ in range(2)]
    try:
        lines = [UnixLine(server.name, server.secret, region) for region in shared]
        with pytest.raises(ConnectionRefusedError):  # of another
            UnixLine(server.name, server.secret, shared[1])
        with pytest.raises(OSError):  # noqa: PT011 - whatever the system calls it
            UnixLine(server.name, bytes(32), Region(100))
        for region, line, left in zip(shared, lines, (1, 0), strict=True):
            region.view(10, 3)[:] = b"abc"
            assert bytes(regions.view(region.name, 10, 3)) == b"abc"
            line.close()
            wait_until(lambda left=left: len(regions) == left, "the shard lets go")
            with pytest.raises(NotAttachedError):
                regions.view(region.name, 10, 3)
    finally:
        server.close()


@pytest.mark.parametrize("gone", [False, True])
def test_a_call_knows_whether_its_caller_waits_yet(gone: bool) -> None:
    begun, go, told = threading.Event(), threading.Event(), []

    def tell(request: bytes, context: Refusing) -> bytes:
        begun.set()
        assert go.wait(30)
        told.append(context.is_active())
        return request

    server = UnixServer([tell], Regions())
    server.start()
    try:
        line = UnixLine(server.name, server.secret)
        line.send(0, b"x", 30)
        assert begun.wait(30)
        if gone:
            line.close()
        go.set()
        wait_until(lambda: told, "it is told")
        assert told == [not gone]
    finally:
        server.close()


def test_no_thread_outlives_its_client(server: UnixServer) -> None:
    def serving() -> int:
        return sum(t.name == f"{server.name} serves" for t in threading.enumerate())

    lines = [_line(server) for _ in range(5)]
    assert serving() == 5
    for line in lines:
        line.close()
    wait_until(lambda: serving() == 0, "every thread ends")


def test_a_shard_that_dies_in_the_middle_loses_nothing() -> None:
    with LocalShards(1) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        client.create_table("t", 2, durability="log", **TABLE)
        keys = np.arange(2000)
        pushed = push_while_killed(shards, client, keys, 2)
        assert pushed > 0
        assert (client.pull("t", keys) == pushed).all()


def test_forgotten_memory_is_told_by_its_reason() -> None:
    """Over gRPC as over the socket."""
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("t", 2, **TABLE)
        shard = client.session().shards[0]
        head = pb.PullRequest(table="t", dim=2, count=1, region="heterps-" + "0" * 32)
        memory = client.session().memory()
        assert memory is not None
        block = memory.take(100, (shard.address,))
        assert block is not None
        for line in (None, block.lines[shard.address]):
            with pytest.raises(BrokenLineError):
                shard.pull(head.SerializeToString(), "Pull", line)
