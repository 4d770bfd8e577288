"""Which of the things that went wrong was the cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from protos.scheduler_pb2 import END_CONNECTION_LOST, EndReason
from scheduler.state.endings import Ending, last_error

_LOG_LINES = 15
_LINE_LENGTH = 200


class Blame(IntEnum):
    """What went wrong, from what is most likely the cause to what is hardly ever."""

    NODE_LOST = 0
    SHARD_KILLED = 1
    KILLED = 2
    SHARD_ENDED = 3
    FAILED = 4
    CONNECTION_LOST = 5  # another process went away: a consequence
    LEFT = 6  # without a word


@dataclass(frozen=True, slots=True)
class Symptom:
    """One thing that went wrong, seen at `when`; the lowest (blame, when) is the cause."""

    blame: Blame
    when: float
    headline: str
    error: str = ""
    log: str = ""
    reason: "EndReason.ValueType" = END_CONNECTION_LOST
    process: str = ""


def blame_of_failure(reason: "EndReason.ValueType") -> Blame:
    """How much a worker is to blame that failed for `reason`."""
    return Blame.CONNECTION_LOST if reason == END_CONNECTION_LOST else Blame.FAILED


def ending_of(symptoms: Sequence[Symptom]) -> Ending:
    """The ending that symptoms come to."""
    symptoms = sorted(symptoms, key=lambda symptom: (symptom.blame, symptom.when))
    cause = symptoms[0]
    last = [line[:_LINE_LENGTH] for line in cause.log.splitlines()[-_LOG_LINES:]]
    error = last_error(cause.error.splitlines()) or cause.headline
    return Ending(cause.reason, explain(symptoms), cause.process, error, "\n".join(last))


def explain(symptoms: Sequence[Symptom]) -> str:
    """The cause, its error and the end of its log; then what else went wrong, a line each."""
    cause, *others = symptoms
    lines = [cause.headline]
    if cause.error:
        lines += [line[:1000] for line in cause.error.splitlines()[:10]]
    if cause.log:
        lines.append("the last lines of its log:")
        lines += [f"  {line[:_LINE_LENGTH]}" for line in cause.log.splitlines()[-_LOG_LINES:]]
    for other in others[:6]:
        tail = f": {_last_line(other.error)[:_LINE_LENGTH]}" if other.error else ""
        lines.append(f"also: {other.headline}{tail}")
    return "\n".join(lines)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
