"""Errors on a job's way, and the ending that goes with each."""

from protos.scheduler_pb2 import (
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
    EndReason,
)
from scheduler.problem.fields import InputError
from scheduler.runs.calls import CallError
from scheduler.runs.launch import LaunchError
from scheduler.runs.offer import AbsentError, OfferError
from scheduler.state.endings import Ending, first_line, last_error, of_text
from scheduler.state.store import StoreError


class JobError(RuntimeError):
    """The attempt cannot go on; `ending` says why."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.text)
        self.ending = ending


def ending_of(error: Exception) -> Ending:
    """The ending that goes with an error on the way to the workers."""
    text = str(error)
    if isinstance(error, JobError | LaunchError):
        return error.ending
    if isinstance(error, CallError):
        reason: EndReason.ValueType = of_text(text) if error.refused else END_LOST_NODE
        lines = text.splitlines()
        return Ending(reason, text, "the profiler", last_error(lines), "\n".join(lines[-15:]))
    if isinstance(error, AbsentError):
        return Ending(END_NO_CAPACITY, text, error=text)
    if isinstance(error, OfferError | InputError):
        return Ending(END_INVALID_JOB, text, error=first_line(text))
    if not isinstance(error, StoreError):
        text = f"internal error: {type(error).__name__}: {error}"
    return Ending(END_INTERNAL, text, error=first_line(text))
