"""What a worker takes an error for: its own, of memory, or of another process that went away."""

from pathlib import Path
from traceback import walk_tb

import grpc
import torch
import torch.distributed as dist

from chassis.channels import RpcError
from chassis.exits import is_out_of_memory
from chassis.rooms import in_ours
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import PARTS_MISSING
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_CUT_UNREADABLE,
    END_DISK_FULL,
    END_DIVERGED,
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_SHARD,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    EndReason,
)
from ps.errors import ShardError, is_disk_full
from workers.errors import (
    BestLostError,
    CallbackError,
    DivergedError,
    PeerLostError,
    UnfitPlanError,
)
from workers.model.code.brought import code_root
from workers.model.saved.cut import CutError, UnfitCutError

_PACKAGES = "/site-packages/"  # may lie in the job's folder, too
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def end_reason_of(error: BaseException, job: JobSpec | None = None) -> EndReason.ValueType:
    """The reason that a job ends for when this error ends one of its workers.

    Args:
        job: whose code may have raised it: connections that code makes are its own affair.
    """
    if isinstance(error, DivergedError):
        return END_DIVERGED
    if isinstance(error, UnfitPlanError | UnfitCutError):
        return END_INVALID_JOB
    if isinstance(error, CutError):
        return END_CUT_UNREADABLE
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return END_OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and is_out_of_memory(str(error)):
        return END_OUT_OF_MEMORY
    if isinstance(error, ShardError) and _has_lost_rows(error, job):
        return END_LOST_SHARD  # it had them all, was started again, and came back without
    cause: BaseException | None = error
    while cause is not None:
        if is_disk_full(cause):
            return END_DISK_FULL
        if _is_of_a_connection(cause, job) and not isinstance(error, CallbackError):
            return END_CONNECTION_LOST
        cause = cause.__cause__
    return END_INTERNAL if isinstance(error, BestLostError) else END_USER_ERROR


def _has_lost_rows(error: ShardError, job: JobSpec | None) -> bool:
    """Whether a shard lacks parts of a step, or a table that the job's workers have made there."""
    lacks_table = error.code is grpc.StatusCode.NOT_FOUND
    of_own_code = job is not None and _raised_in(error, code_root(job))
    return error.reason == PARTS_MISSING or (lacks_table and not of_own_code)


def told(error: BaseException) -> str:
    """What is said of an error that ends a worker."""
    ended = "; the job's code ended the process" if isinstance(error, SystemExit) else ""
    return f"{type(error).__name__}: {error}{ended}"


def _is_of_a_connection(error: BaseException, job: JobSpec | None) -> bool:
    if isinstance(error, RpcError | ShardError):
        return error.code in _AWAY
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    of_a_connection = isinstance(error, ConnectionError | TimeoutError)
    return of_a_connection and (job is None or not _raised_in(error, code_root(job)))


def _raised_in(error: BaseException, folder: Path) -> bool:
    """Whether code of that folder was under way."""
    files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
    return any(
        Path(file).is_relative_to(folder) and not in_ours(file) and _PACKAGES not in file
        for file in files
    )
