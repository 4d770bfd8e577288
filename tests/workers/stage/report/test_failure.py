"""What a worker takes its errors for, by their types."""

import errno
import socket
import urllib.error
from pathlib import Path

import grpc
import pytest
import torch
import torch.distributed as dist

from chassis.channels import RpcError
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import DISK_FULL, PARTS_MISSING
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_DISK_FULL,
    END_INVALID_JOB,
    END_LOST_SHARD,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    EndReason,
)
from ps.errors import CheckpointError, NoSpaceError, ShardError
from workers.data.errors import DataError
from workers.errors import PeerLostError, UnfitPlanError, peers_needed
from workers.model.code.entry import ModelError, load_entry
from workers.stage.report.failure import end_reason_of

FAILED = grpc.StatusCode.FAILED_PRECONDITION
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
        (
            ShardError(0, "h:1", FAILED, "slots 1 are lacking", PARTS_MISSING),
            END_LOST_SHARD,
        ),
        (ShardError(0, "h:1", grpc.StatusCode.NOT_FOUND, "no table"), END_LOST_SHARD),
        (ShardError(0, "h:1", FAILED, "the step was dropped"), END_USER_ERROR),
        (ShardError(0, "h:1", FAILED, "no space left", DISK_FULL), END_DISK_FULL),
        (NoSpaceError("no space left"), END_DISK_FULL),
        (OSError(errno.ENOSPC, "no space left"), END_DISK_FULL),
        (OSError(errno.EFBIG, "file too large"), END_DISK_FULL),
        (CheckpointError("no manifest"), END_USER_ERROR),
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
        (SystemExit(71), END_USER_ERROR),
        (SystemExit(75), END_USER_ERROR),
        (UnfitPlanError("other layers"), END_INVALID_JOB),
        (MemoryError(), END_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA"), END_OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), END_OUT_OF_MEMORY),
        (PeerLostError("can't allocate memory"), END_OUT_OF_MEMORY),
    ],
    ids=repr,
)
def test_the_type_of_an_error_is_its_reason(error: Exception, reason: EndReason.ValueType) -> None:
    assert end_reason_of(error) == reason


@pytest.mark.parametrize("error", [ConnectionResetError("x"), TimeoutError("x")], ids=repr)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_connection_of_the_jobs_own_code_is_none_of_ours(
    tmp_path: Path, error: Exception, wrapped: bool
) -> None:
    (tmp_path / "model.py").write_text("def build(error):\n    raise error\n")
    entry = load_entry("model.py:build", tmp_path, "model.entry")
    with pytest.raises(type(error)) as raised:
        entry(error)
    found = caused(ModelError("model.entry failed"), raised.value) if wrapped else raised.value
    assert end_reason_of(found, JobSpec(directory=str(tmp_path))) == END_USER_ERROR
    assert end_reason_of(found, JobSpec(directory=str(tmp_path / "other"))) == END_CONNECTION_LOST


def test_a_table_that_the_jobs_own_code_asks_for_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build(error):\n    raise error\n")
    entry = load_entry("model.py:build", tmp_path, "model.entry")
    with pytest.raises(ShardError) as raised:
        entry(ShardError(0, "h:1", grpc.StatusCode.NOT_FOUND, "no table"))
    assert end_reason_of(raised.value, JobSpec(directory=str(tmp_path))) == END_USER_ERROR


def test_a_peer_that_is_lost_under_the_jobs_code_is_one(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def forward(error):\n    raise error\n")
    entry = load_entry("model.py:forward", tmp_path, "model.entry")
    with pytest.raises(PeerLostError) as raised:  # as where experts are split
        entry(PeerLostError("gone"))
    assert end_reason_of(raised.value, JobSpec(directory=str(tmp_path))) == END_CONNECTION_LOST


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
