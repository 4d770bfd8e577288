"""Why a call was refused travels as a code, whatever the words."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from chassis.channels import RpcError, call, call_async, connect, connect_async
from chassis.refusal import reason_of, refuse
from chassis.servers import Server
from protos import stage_pb2, stage_pb2_grpc
from protos.reason_pb2 import REASON_UNSPECIFIED, WHOLE_SAVE_NEEDED


class Stage(stage_pb2_grpc.StageServicer):
    def Start(self, request: stage_pb2.Topology, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "no – for a reason", WHOLE_SAVE_NEEDED)

    def Connect(self, request: stage_pb2.ConnectRequest, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("heterps-reason", "OF_A_LATER_VERSION"), ("other", "x")))
        context.abort(grpc.StatusCode.ABORTED, "no")


@pytest.fixture
def address() -> Iterator[str]:
    server = Server("stage")
    server.add(stage_pb2_grpc.add_StageServicer_to_server, Stage(), "heterps.v1.Stage")
    yield server.start()
    server.stop(0.1)


def test_a_reason_comes_beside_the_status(address: str) -> None:
    with connect(address) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        with pytest.raises(RpcError, match="stage 3: no – for a reason") as caught:
            call(stub.Start, stage_pb2.Topology(), what="stage 3", timeout_s=5)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == WHOLE_SAVE_NEEDED


def test_a_reason_reaches_coroutines(address: str) -> None:
    async def ask() -> None:
        async with connect_async(address) as channel:
            stub = stage_pb2_grpc.StageStub(channel)
            await call_async(stub.Start, stage_pb2.Topology(), what="stage", timeout_s=5)

    with pytest.raises(RpcError) as caught:
        asyncio.run(ask())
    assert caught.value.reason == WHOLE_SAVE_NEEDED


def test_no_reason_or_one_that_is_not_known(address: str) -> None:
    with connect(address) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        with pytest.raises(RpcError) as caught:
            call(stub.Connect, stage_pb2.ConnectRequest(), what="stage", timeout_s=5)
        assert caught.value.reason == REASON_UNSPECIFIED
        with pytest.raises(RpcError) as caught:
            call(stub.Join, stage_pb2.JoinRequest(), what="stage", timeout_s=5)
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.reason == REASON_UNSPECIFIED
    assert reason_of(grpc.RpcError("not of a call")) == REASON_UNSPECIFIED
