"""What a worker takes its errors for, by their types."""

import socket
import urllib.error

import grpc
import pytest
import torch
import torch.distributed as dist

from chassis.channels import RpcError
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    EndReason,
)
from ps.errors import ShardError
from workers.data.errors import DataError
from workers.errors import PeerLostError, peers_needed
from workers.stage.failure import end_reason_of

GONE, BAD = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("connection timed out, said gloo"), END_USER_ERROR),  # words count for nothing
        (RuntimeError("shape mismatch"), END_USER_ERROR),
        (RpcError("stage 1 worker 0", GONE, "gone"), END_CONNECTION_LOST),
        (RpcError("stage 1 worker 0", grpc.StatusCode.CANCELLED, "gone"), END_CONNECTION_LOST),
        (RpcError("stage 1 worker 0", BAD, "bad frame"), END_USER_ERROR),
        (ShardError(0, "h:1", grpc.StatusCode.DEADLINE_EXCEEDED, "silent"), END_CONNECTION_LOST),
        (ShardError(0, "h:1", BAD, "refused"), END_USER_ERROR),
        (PeerLostError("gone"), END_CONNECTION_LOST),
        (dist.DistNetworkError("gone"), END_CONNECTION_LOST),
        (BrokenPipeError(), END_CONNECTION_LOST),
        (TimeoutError("no Start"), END_CONNECTION_LOST),
        (socket.gaierror("no such host"), END_USER_ERROR),
        (
            caused(DataError("job", "data.path", "u", "a file"), ConnectionRefusedError()),
            END_CONNECTION_LOST,
        ),
        (urllib.error.URLError(ConnectionRefusedError()), END_USER_ERROR),
        (MemoryError(), END_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA"), END_OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), END_OUT_OF_MEMORY),
        (PeerLostError("can't allocate memory"), END_OUT_OF_MEMORY),
    ],
    ids=repr,
)
def test_the_type_of_an_error_is_its_reason(error: Exception, reason: EndReason.ValueType) -> None:
    assert end_reason_of(error) == reason


@pytest.mark.parametrize("lost", [RuntimeError("Connection closed"), dist.DistBackendError("x")])
def test_a_collective_that_fails_has_lost_a_peer(lost: RuntimeError) -> None:
    with pytest.raises(PeerLostError) as raised, peers_needed():
        raise lost
    assert raised.value.__cause__ is lost


@pytest.mark.parametrize("own", [ValueError("x"), torch.OutOfMemoryError("x"), KeyError("x")])
def test_other_errors_of_a_collective_stay_what_they_are(own: Exception) -> None:
    with pytest.raises(type(own)) as raised, peers_needed():
        raise own
    assert raised.value is own
