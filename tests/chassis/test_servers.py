"""Serving and calling: health, reflection, bind rules, tokens, retries."""

import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chassis.channels import RpcError, call, connect
from chassis.security import Security, SecurityError
from chassis.servers import BindError, Server
from protos import stage_pb2, stage_pb2_grpc


class Stage(stage_pb2_grpc.StageServicer):
    def Join(self, request, context):
        return stage_pb2.JoinReply(name="generated")


def serve(bind="127.0.0.1:0", **options):
    server = Server("stage", bind, **options)
    server.add(
        stage_pb2_grpc.add_StageServicer_to_server,
        Stage(),
        "heterps.v1.Stage",
        raw={"Start": lambda data, context: data[:0]},
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
