"""The states that an attempt at a job goes through, and which of them its job goes through."""

from enum import Enum, auto
from typing import Final

from protos import scheduler_pb2 as pb


class State(Enum):
    """How far an attempt has come."""

    NEW = auto()
    PROFILING = auto()
    PLANNING = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()
    HANDED_OVER = auto()


NEXT: Final = {
    State.NEW: {State.PROFILING, State.RUNNING, State.STOPPING, State.HANDED_OVER},
    State.PROFILING: {State.PLANNING, State.STOPPING, State.HANDED_OVER},
    State.PLANNING: {State.STARTING, State.STOPPING, State.HANDED_OVER},
    State.STARTING: {State.RUNNING, State.STOPPING, State.HANDED_OVER},
    State.RUNNING: {State.STOPPING, State.HANDED_OVER},
    State.STOPPING: {State.ENDED, State.HANDED_OVER},
    State.ENDED: set[State](),
    State.HANDED_OVER: set[State](),
}
OF_JOB: Final = {
    State.PROFILING: pb.PROFILING,
    State.PLANNING: pb.PLANNING,
    State.STARTING: pb.STARTING,
    State.RUNNING: pb.RUNNING,
}
