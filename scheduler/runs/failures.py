"""Errors on a job's way, and the ending that goes with each."""

from chassis.exits import reason_of_refusal
from protos.scheduler_pb2 import (
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
)
from scheduler.problem.fields import InputError
from scheduler.runs.calls import CallError
from scheduler.runs.offer import AbsentError, OfferError
from scheduler.state.endings import Ending, first_line, last_error
from scheduler.state.store import StoreError

_LOG_LINES = 15


class JobError(RuntimeError):
    """The attempt cannot go on; `ending` says what broke it, `besides` why that ends it."""

    def __init__(self, ending: Ending, besides: str = "") -> None:
        super().__init__(ending.text)
        self.ending = ending
        self.besides = besides


def ending_of_call(error: CallError, process: str, node: str, where: str = "") -> Ending:
    """The ending of an attempt for which a node could not start a process.

    Args:
        process, node: that it goes by, where the node refused and where it was not reached.
        where: the process is, to be told at the end.
    """
    told = str(error)
    text = f"{told}\n{where}" if where else told
    if not error.refused:
        return Ending(END_LOST_NODE, text, node, first_line(told))
    reason = reason_of_refusal(error.reason)
    lines = told.splitlines()
    return Ending(reason, text, process, last_error(lines), "\n".join(lines[-_LOG_LINES:]))


def ending_of(error: Exception) -> Ending:
    """The ending that goes with an error on the way to the workers."""
    text = str(error)
    if isinstance(error, JobError):
        return error.ending
    if isinstance(error, CallError):
        return ending_of_call(error, "the profiler", "the profiler")
    if isinstance(error, AbsentError):
        return Ending(END_NO_CAPACITY, text, error=text)
    if isinstance(error, OfferError | InputError):
        return Ending(END_INVALID_JOB, text, error=first_line(text))
    if not isinstance(error, StoreError):
        text = f"internal error: {type(error).__name__}: {error}"
    return Ending(END_INTERNAL, text, error=first_line(text))
