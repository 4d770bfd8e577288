"""Serving and calling: health, reflection, bind rules, tokens, retries."""

import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chassis import servers
from chassis.channels import OPTIONS, RpcError, call, connect
from chassis.security import Security, SecurityError
from chassis.servers import BindError, Server
from heterps.home import certs
from protos import stage_pb2, stage_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


class Stage(stage_pb2_grpc.StageServicer):
    def Join(self, request, context):
        return stage_pb2.JoinReply(name="generated")


SLEEP = b"sleep"  # how a message begins that takes long
WRONG = b"\xff\xff\xff"  # no message


def _send(data, context):
    if data == WRONG:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "wrong")
    if data.startswith(SLEEP):
        time.sleep(30)
    return b""


def serve(bind="127.0.0.1:0", **options):
    server = Server("stage", bind, **options)
    server.add(
        stage_pb2_grpc.add_StageServicer_to_server,
        Stage(),
        "heterps.v1.Stage",
        raw={"Start": _send},
    )
    server.start()
    return server


@pytest.fixture
def server():
    server = serve()
    yield server
    server.stop(0.1)


def test_health_and_reflection_are_served(server):
    with connect(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service="heterps.v1.Stage"), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
        names = {s.name for s in listed.list_services_response.service}
        assert "heterps.v1.Stage" in names


def test_raw_and_generated_methods_share_a_service(server):
    with connect(server.address) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        joined = stub.Join(stage_pb2.JoinRequest(), timeout=5)
        assert joined == stage_pb2.JoinReply(name="generated")
        large = stage_pb2.Topology(job_id="x" * (6 << 20))
        assert stub.Start(large, timeout=5) == stage_pb2.StartReply()


def test_a_port_in_use_is_an_error_that_names_it(server):
    with pytest.raises(BindError, match=f"cannot listen on {server.address}: the port is in use"):
        serve(server.address)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_a_bind_that_others_reach_demands_tls_and_a_token(bind):
    with pytest.raises(SecurityError, match="refusing to listen"):
        Server("stage", bind, security=Security())
    with pytest.raises(SecurityError, match="refusing to listen"):
        Server("stage", bind, security=Security(certificate=b"c", key=b"k"))


def test_a_call_to_nobody_names_the_callee_and_ends_in_time():
    server = serve()
    server.stop(0)
    with connect(server.address) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        began = time.monotonic()
        with pytest.raises(RpcError, match="stage 3: no server answers there") as caught:
            call(stub.Start, stage_pb2.Topology(), what="stage 3", timeout_s=2, retry_s=0.5)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5


def test_a_retried_call_reaches_a_server_that_comes_back():
    first = serve()
    address = first.address
    first.stop(0)
    revived = []
    timer = threading.Timer(0.7, lambda: revived.append(serve(address)))
    timer.start()
    try:
        with connect(address) as channel:
            stub = stage_pb2_grpc.StageStub(channel)
            call(stub.Start, stage_pb2.Topology(), what="stage", timeout_s=2, retry_s=20)
    finally:
        timer.join()
        revived[0].stop(0)


# Who may make a server hold how much.

SERVING = """
import sys, threading, time
from chassis.memory import keep_buffers
from tests.chassis.test_servers import Stage, serve

keep_buffers()
server = serve(threads=2)
print(server.address, flush=True)
sys.stdin.read()
"""
_SENT = 256 << 20
_HELD = 48 << 20  # far less than is sent


class Process:
    """A server in a process of its own, so that its memory can be told."""

    def __init__(self):
        self._popen = subprocess.Popen(
            [sys.executable, "-c", SERVING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.address = self._popen.stdout.readline().strip()
        self.call(health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest())
        self._began = self._bytes("VmRSS")

    def call(self, stub, method, request):
        with connect(self.address) as channel:
            return getattr(stub(channel), method)(request, timeout=60)

    def held(self):
        """Bytes that it took beyond its first, at most."""
        return self._bytes("VmHWM") - self._began

    def _bytes(self, name):
        status = Path(f"/proc/{self._popen.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) << 10

    def close(self):
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def secured(tmp_path, monkeypatch):
    """A cluster's files in the environment."""
    certs.make(tmp_path, ["127.0.0.1"])
    for name, value in certs.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def process():
    made = []

    def start():
        made.append(Process())
        return made[-1]

    yield start
    for each in made:
        each.close()


def _without_token(monkeypatch, folder, token):
    if token is None:
        monkeypatch.delenv("HETERPS_TOKEN_FILE")
    else:
        (folder / "token").write_text(token)


@pytest.mark.parametrize("token", [None, "wrong" * 8])
def test_what_comes_without_the_token_is_not_read(secured, process, monkeypatch, token):
    started = process()
    _without_token(monkeypatch, secured, token)
    for method in ("Start", "Join", "Nothing"):
        with connect(started.address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/heterps.v1.Stage/{method}")(bytes(_SENT), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert started.held() < _HELD


def test_many_without_the_token_at_once_are_not_held(secured, process, monkeypatch):
    """While all threads are busy with those who have it."""
    started = process()
    with connect(started.address) as with_token:
        busy = [
            with_token.unary_unary("/heterps.v1.Stage/Start").future(SLEEP, timeout=60)
            for _ in range(4)
        ]
        _without_token(monkeypatch, secured, None)
        body = bytes(16 << 20)
        with connect(started.address) as channel:
            calls = [
                channel.unary_unary("/heterps.v1.Stage/Start").future(body, timeout=60)
                for _ in range(100)
            ]
            codes = {call.code() for call in calls}
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}
        assert [call.code() for call in busy if call.done()] == []
        assert started.held() < _HELD
        for call in busy:
            call.cancel()


def test_health_is_told_without_the_token_and_unread(secured, process, monkeypatch):
    started = process()
    _without_token(monkeypatch, secured, None)
    check = f"/{health.SERVICE_NAME}/Check"
    with connect(started.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        channel.unary_unary(check)(bytes(_SENT), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:  # it would stay for ever
            next(
                health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(), timeout=60
                )
            )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert started.held() < _HELD


def test_a_message_beyond_the_limit_is_refused_by_its_length(process):
    started = process()
    with connect(started.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/heterps.v1.Stage/Start")(bytes(_SENT), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert started.held() < _HELD


def test_calls_that_wait_for_a_thread_wait_at_their_callers(process):
    """Of those under way at once a server holds what its threads read, and a little of others."""
    started = process()
    with connect(started.address) as channel:
        slow = channel.unary_unary("/heterps.v1.Stage/Start")
        calls = [slow.future(SLEEP + bytes(16 << 20), timeout=60) for _ in range(32)]  # 512 MiB
        time.sleep(1)
        assert not all(call.done() for call in calls)
        assert started.held() < 2 * 2 * (16 << 20) + 32 * (1 << 20) + _HELD
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("Start", grpc.StatusCode.INVALID_ARGUMENT),
        ("Join", grpc.StatusCode.INVALID_ARGUMENT),
        ("Nothing", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_calls_that_were_refused_do_not_count(server, method, code):
    """More of them than one connection may have at once."""
    with connect(server.address) as channel:
        wrong = channel.unary_unary(f"/heterps.v1.Stage/{method}")
        codes = set()
        for _ in range(2 * servers._STREAMS):
            with pytest.raises(grpc.RpcError) as caught:
                wrong(WRONG, timeout=60)
            codes.add(caught.value.code())
        assert codes == {code}
        stage_pb2_grpc.StageStub(channel).Start(stage_pb2.Topology(), timeout=60)


def test_connections_beyond_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr(servers, "_CONNECTIONS", 3)
    server = serve()
    channels = [connect(server.address) for _ in range(5)]
    try:
        codes = []
        for channel in channels:
            try:
                stage_pb2_grpc.StageStub(channel).Start(stage_pb2.Topology(), timeout=60)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
        assert codes == [grpc.StatusCode.OK] * 3 + [grpc.StatusCode.UNAVAILABLE] * 2
        channels.pop(3).close()  # it would try again, too
        channels.pop(0).close()
        stub = stage_pb2_grpc.StageStub(channels[-1])
        call(stub.Start, stage_pb2.Topology(), what="stage", timeout_s=60, retry_s=60)
    finally:
        for channel in channels:
            channel.close()
        server.stop(0.1)


def test_no_address_takes_all_connections(secured, monkeypatch):
    monkeypatch.setattr(servers, "_CONNECTIONS", 8)
    monkeypatch.setattr(servers, "_LOOK_S", 0.05)
    server = serve("0.0.0.0:0")
    port = int(server.address.rpartition(":")[2])
    others = ("127.0.0.2", 0)
    crowd = [socket.create_connection(("127.0.0.1", port), source_address=others) for _ in range(8)]
    try:
        with connect(f"127.0.0.1:{port}") as channel:
            stub = stage_pb2_grpc.StageStub(channel)
            call(stub.Start, stage_pb2.Topology(), what="stage", timeout_s=10, retry_s=10)
        closed = []
        for number, each in enumerate(crowd):
            each.setblocking(False)
            with suppress(BlockingIOError):
                assert each.recv(1) == b""
                closed.append(number)
        assert closed == [6, 7], "the newest of those beyond its share"
    finally:
        for each in crowd:
            each.close()
        server.stop(0.1)


def test_servers_are_made_in_one_place():
    """So that none is without the limits."""
    found = [
        str(file.relative_to(ROOT))
        for room in ("heterps", "scheduler", "workers", "ps", "chassis", "protos")
        for file in (ROOT / room).rglob("*.py")
        if re.search(r"\b(grpc|aio)\.server\(", file.read_text())
    ]
    assert found == ["chassis/servers.py"]


# Keep-alive.


def test_grpc_knows_every_option():
    """It passes over those that it does not know, so a slip would do nothing."""
    library = Path(cygrpc.__file__).read_bytes()
    options = [name for name, _ in (*OPTIONS, *servers._SERVER_OPTIONS)]
    assert [name for name in options if name.encode() + b"\0" not in library] == []


@pytest.mark.exhaustive
def test_a_connection_without_calls_stays(server):
    """Pings are sent as often as the server takes them, which cuts off who sends more."""
    quick = list((dict(OPTIONS) | {"grpc.keepalive_time_ms": 11_000}).items())
    states = []
    with grpc.insecure_channel(server.address, quick) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        stub.Start(stage_pb2.Topology(), timeout=5)
        channel.subscribe(states.append)
        time.sleep(60)
        assert states == [grpc.ChannelConnectivity.READY]
        stub.Start(stage_pb2.Topology(), timeout=5)
