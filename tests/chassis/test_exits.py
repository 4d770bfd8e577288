"""Which reason goes with which exit code, there and back."""

import pytest

from chassis.exits import exit_code_of, reason_of_exit
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_INVALID_JOB,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    EndReason,
)


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        (1, "ValueError: bad", END_USER_ERROR),
        (1, "RpcError: shard 0: UNAVAILABLE", END_USER_ERROR),  # it is the code that counts
        (75, "RpcError: shard 0: UNAVAILABLE", END_CONNECTION_LOST),
        (71, "RuntimeError: no room", END_OUT_OF_MEMORY),
        (78, "UnfitPlanError: other layers", END_INVALID_JOB),
        (1, "MemoryError", END_OUT_OF_MEMORY),
        (1, "torch.cuda.OutOfMemoryError: CUDA out of memory.", END_OUT_OF_MEMORY),
        (1, "std::bad_alloc", END_OUT_OF_MEMORY),
        (137, "", END_OUT_OF_MEMORY),
        (-9, "", END_WORKER_CRASHED),
        (-11, "", END_WORKER_CRASHED),
        (0, "", END_WORKER_CRASHED),
    ],
)
def test_an_exit_code_tells_the_reason(code: int, error: str, reason: EndReason.ValueType) -> None:
    assert reason_of_exit(code, error) == reason


@pytest.mark.parametrize(
    "reason", [END_OUT_OF_MEMORY, END_CONNECTION_LOST, END_INVALID_JOB, END_USER_ERROR]
)
def test_what_a_process_ends_with_is_read_again(reason: EndReason.ValueType) -> None:
    assert reason_of_exit(exit_code_of(reason)) == reason
