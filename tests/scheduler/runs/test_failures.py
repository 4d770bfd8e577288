"""Which ending goes with an error on the way to the workers."""

import pytest

from protos.reason_pb2 import (
    PROCESS_CRASHED,
    PROCESS_CUT_OFF,
    PROCESS_CUT_UNREADABLE,
    PROCESS_LACKS_ROOM,
    PROCESS_OUT_OF_MEMORY,
    REASON_UNSPECIFIED,
    Reason,
)
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_CUT_UNREADABLE,
    END_DISK_FULL,
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    EndReason,
)
from scheduler.problem.fields import InputError
from scheduler.runs.calls import CallError
from scheduler.runs.failures import JobError, ending_of, ending_of_call
from scheduler.runs.offer import AbsentError, OfferError
from scheduler.state.endings import Ending
from scheduler.state.store import StoreError

_LOG = "worker 0 ended by signal 9 before it was ready\nline\nValueError: out of memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JobError(Ending(END_NO_CAPACITY)), END_NO_CAPACITY),
        (AbsentError("no node"), END_NO_CAPACITY),
        (OfferError("nothing left"), END_INVALID_JOB),
        (InputError("workload.layers", "empty", "one or more"), END_INVALID_JOB),
        (StoreError("redis is away"), END_INTERNAL),
        (KeyError("x"), END_INTERNAL),
        (CallError("no server answers"), END_LOST_NODE),
        (CallError("profiling failed", refused=True), END_USER_ERROR),
    ],
    ids=repr,
)
def test_an_error_has_a_reason(error: Exception, reason: EndReason.ValueType) -> None:
    assert ending_of(error).reason == reason


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (REASON_UNSPECIFIED, END_USER_ERROR),  # whatever the words
        (PROCESS_OUT_OF_MEMORY, END_OUT_OF_MEMORY),
        (PROCESS_CRASHED, END_WORKER_CRASHED),
        (PROCESS_CUT_OFF, END_CONNECTION_LOST),
        (PROCESS_CUT_UNREADABLE, END_CUT_UNREADABLE),
        (PROCESS_LACKS_ROOM, END_DISK_FULL),
    ],
)
def test_a_node_that_refuses_tells_the_reason(
    told: Reason.ValueType, reason: EndReason.ValueType
) -> None:
    error = CallError(_LOG, refused=True, reason=told)
    ending = ending_of_call(error, "stage 0 worker 0", "node n", "(on node n)")
    assert (ending.reason, ending.process) == (reason, "stage 0 worker 0")
    assert ending.error == "ValueError: out of memory"
    assert ending.text == f"{_LOG}\n(on node n)"
    assert ending.last_lines == _LOG


def test_a_node_that_is_not_reached_is_lost() -> None:
    ending = ending_of_call(CallError("gone\nmore"), "stage 0 worker 0", "node n")
    assert (ending.reason, ending.process, ending.error) == (END_LOST_NODE, "node n", "gone")
