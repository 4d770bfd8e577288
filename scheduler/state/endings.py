"""How a job's attempt ends: the reason, from the closed list, and what its owner must know."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protos.scheduler_pb2 import (
    CANCELLED,
    END_CANCELLED,
    END_CONNECTION_LOST,
    END_CUT_UNREADABLE,
    END_INTERNAL,
    END_LOST_NODE,
    END_LOST_SHARD,
    END_NO_CAPACITY,
    END_SCHEDULER_LOST,
    END_SUCCEEDED,
    END_WORKER_CRASHED,
    FAILED,
    SUCCEEDED,
    Attempt,
    EndReason,
    JobState,
    JobStatus,
)

# Not the job's own fault: starting over may help.
RETRIED = frozenset(
    (
        END_CONNECTION_LOST,
        END_CUT_UNREADABLE,
        END_INTERNAL,
        END_LOST_NODE,
        END_LOST_SHARD,
        END_NO_CAPACITY,
        END_SCHEDULER_LOST,
        END_WORKER_CRASHED,
    )
)
SCHEDULER_LIMIT = 10  # attempts that a job may lose to schedulers that end under it
_STATES = {END_SUCCEEDED: SUCCEEDED, END_CANCELLED: CANCELLED}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an attempt ended.

    Attributes:
        text: the whole story, the cause first.
        process: which process broke, for people.
        error: what broke it, in one line.
        last_lines: of that process's log.
        cancelled_by: the user who cancelled the job.
        drained: nothing broke: the job had to leave a node.
    """

    reason: "EndReason.ValueType"
    text: str = ""
    process: str = ""
    error: str = ""
    last_lines: str = ""
    cancelled_by: str = ""
    drained: bool = False

    @property
    def state(self) -> "JobState.ValueType":
        """The final state that goes with the reason."""
        return _STATES.get(self.reason, FAILED)

    def write(self, status: JobStatus) -> None:
        """Put it into a job's status."""
        status.end_reason, status.reason = self.reason, self.text
        status.process, status.error = self.process, self.error
        status.last_lines = self.last_lines
        status.cancelled_by = self.cancelled_by


def may_retry(status: JobStatus, ending: Ending) -> bool:
    """Whether the job is to start over, or to have lost workers replaced.

    `retries` faults that are not its own are forgiven, the replacements among them.

    Attempts lost to a scheduler that went away count apart, up to `SCHEDULER_LIMIT`; so do those
    that found a cut of the job's own unreadable, as each leaves one less. The cut of an earlier job
    that it was told to go on from cannot be done without. What had to leave a node that drains is
    always forgiven: each such node is one less.
    """
    if ending.reason not in RETRIED:
        return False
    if ending.drained:
        return True
    if ending.reason == END_CUT_UNREADABLE:
        return any(cut.step == _begun_at(status) for cut in status.cuts)
    ended = Counter(one.end_reason for one in status.attempts if not one.drained)
    if ending.reason == END_SCHEDULER_LOST:
        return ended[END_SCHEDULER_LOST] < SCHEDULER_LIMIT
    apart = ended[END_SCHEDULER_LOST] + ended[END_CUT_UNREADABLE]
    replaced = sum(not recovery.drained for recovery in status.recoveries)
    return ended.total() - apart + replaced < status.retries


def start_over(
    status: JobStatus,
    ending: Ending,
    now: float,
    price_per_hour: float = 0.0,
    generation: int = 0,
) -> None:
    """Close the attempt and forget its progress, but for its cuts; the caller sets the state.

    A cut that could not be read is no cut, nor are those after it.

    Args:
        price_per_hour: of the attempt's plan.
        generation: of its workers, the last.
    """
    cuts = list(status.cuts)
    if ending.reason == END_CUT_UNREADABLE:
        cuts = [cut for cut in cuts if cut.step < _begun_at(status)]
    end_shares(status, now)
    status.attempts.append(
        Attempt(
            number=status.attempt,
            end_reason=ending.reason,
            reason=ending.text,
            error=ending.error,
            process=ending.process,
            ended_at=now,
            from_step=status.from_step,
            step=status.step,
            started_at=status.started_at,
            price_per_hour=price_per_hour,
            generation=generation,
            drained=ending.drained,
        )
    )
    goes_on = f"; it goes on from step {cuts[-1].step}" if cuts else ""
    fresh = JobStatus(
        job_id=status.job_id,
        name=status.name,
        submitted_at=status.submitted_at,
        began_at=status.began_at,
        priority=status.priority,
        retries=status.retries,
        attempt=status.attempt,
        attempts=status.attempts,
        cuts=cuts,
        submitted_by=status.submitted_by,
        recoveries=status.recoveries,
        moves=status.moves,
        shares=status.shares,
        reason=f"attempt {status.attempt} ended: {first_line(ending.text)}{goes_on}",
    )
    status.CopyFrom(fresh)


def end_shares(status: JobStatus, now: float) -> None:
    """None of a job's units is shared any more."""
    for one in status.shares:
        one.until = one.until or now


def _begun_at(status: JobStatus) -> int:
    """The step of the cut that the attempt's workers have read last; 0 for none."""
    number = status.attempt
    read = [(one.at, one.step) for one in status.recoveries if one.back and one.attempt == number]
    read += [(m.at, m.step) for m in status.moves if not m.failed and m.attempt == number]
    return max(read)[1] if read else status.from_step


def last_error(lines: Sequence[str]) -> str:
    """A traceback's last line, or else the last line that is not empty; for people."""
    seen = [line.strip() for line in lines if line.strip()]
    raised = [line for line in seen if _RAISED.match(line)]
    return (raised or seen or [""])[-1][:1000]


def first_line(text: str) -> str:
    """The first line of a text, without the others."""
    return text.partition("\n")[0]


_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Stop\w*)(:|$)")
