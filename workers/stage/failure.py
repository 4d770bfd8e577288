"""What a worker takes an error for: its own, of memory, or of another process that went away."""

import grpc
import torch
import torch.distributed as dist

from chassis.channels import RpcError
from chassis.exits import is_out_of_memory
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_DIVERGED,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    EndReason,
)
from ps.errors import ShardError
from workers.errors import DivergedError, PeerLostError

_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def end_reason_of(error: BaseException) -> EndReason.ValueType:
    """The reason that a job ends for when this error ends one of its workers."""
    if isinstance(error, DivergedError):
        return END_DIVERGED
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return END_OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and is_out_of_memory(str(error)):
        return END_OUT_OF_MEMORY
    cause: BaseException | None = error
    while cause is not None:
        if _is_of_a_connection(cause):
            return END_CONNECTION_LOST
        cause = cause.__cause__
    return END_USER_ERROR


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, RpcError | ShardError):
        return error.code in _AWAY
    return isinstance(error, PeerLostError | dist.DistError | ConnectionError | TimeoutError)
