"""Why a process ended: by its exit code, as what it cannot tell any more, it can end with.

And by the reason with which a node refuses a call that was about the process.
"""

import re

from protos.reason_pb2 import (
    PROCESS_CRASHED,
    PROCESS_CUT_OFF,
    PROCESS_CUT_UNREADABLE,
    PROCESS_LACKS_ROOM,
    PROCESS_OUT_OF_MEMORY,
    PROCESS_UNFIT,
    REASON_UNSPECIFIED,
    Reason,
)
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_CUT_UNREADABLE,
    END_DISK_FULL,
    END_INVALID_JOB,
    END_OUT_OF_MEMORY,
    END_USER_ERROR,
    END_WORKER_CRASHED,
    EndReason,
)

# Of sysexits.h those that come closest: EX_NOINPUT, EX_OSERR, EX_IOERR, EX_TEMPFAIL, EX_CONFIG.
# All else is 1.
_CODES = {
    END_CUT_UNREADABLE: 66,
    END_OUT_OF_MEMORY: 71,
    END_DISK_FULL: 74,
    END_CONNECTION_LOST: 75,
    END_INVALID_JOB: 78,
}
_REASONS = {code: reason for reason, code in _CODES.items()}
_REFUSALS = {
    END_OUT_OF_MEMORY: PROCESS_OUT_OF_MEMORY,
    END_WORKER_CRASHED: PROCESS_CRASHED,
    END_CONNECTION_LOST: PROCESS_CUT_OFF,
    END_INVALID_JOB: PROCESS_UNFIT,
    END_CUT_UNREADABLE: PROCESS_CUT_UNREADABLE,
    END_DISK_FULL: PROCESS_LACKS_ROOM,
}
_REFUSED = {refusal: reason for reason, refusal in _REFUSALS.items()}
DAMAGED = 65  # EX_DATAERR: what it kept is damaged; to start it again gives the same
TOLD = 64  # EX_USAGE: what is wrong lies in the user's files, and the last line says it all
_SHELL_KILLED = 137  # how a shell reports a child that the kernel killed
_MEMORY = re.compile(
    r"\bMemoryError\b|out of memory|OutOfMemoryError|std::bad_alloc|cannot allocate memory"
    r"|can't allocate memory|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)


def exit_code_of(reason: EndReason.ValueType) -> int:
    """What a process that fails for `reason` exits with."""
    return _CODES.get(reason, 1)


def reason_of_exit(code: int, error: str = "") -> EndReason.ValueType:
    """Why a process ended.

    Args:
        code: its exit code; negative: killed by that signal.
        error: the last line of its traceback.
    """
    if code == _SHELL_KILLED or is_out_of_memory(error):
        return END_OUT_OF_MEMORY
    if code <= 0:
        return END_WORKER_CRASHED
    return _REASONS.get(code, END_USER_ERROR)


def refusal_of(reason: EndReason.ValueType) -> Reason.ValueType:
    """With what a node refuses a call about a process that ended for `reason`."""
    return _REFUSALS.get(reason, REASON_UNSPECIFIED)


def reason_of_refusal(refusal: Reason.ValueType) -> EndReason.ValueType:
    """Why the process ended for which a node refused a call."""
    return _REFUSED.get(refusal, END_USER_ERROR)


def is_out_of_memory(error: str) -> bool:
    """Whether an error's text tells of memory that ran out.

    Text is all there is of it in two cases: Python ends a process by a traceback with exit code 1
    whatever was raised, and torch's CPU allocator raises a bare RuntimeError.
    """
    return _MEMORY.search(error) is not None
