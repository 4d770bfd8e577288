"""What is seen of one process, as a symptom: it ended, failed, or is gone with its node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chassis.exits import reason_of_exit
from chassis.process import describe_exit
from protos.node_pb2 import SHARD
from protos.scheduler_pb2 import (
    END_LOST_NODE,
    END_LOST_SHARD,
    END_OUT_OF_MEMORY,
    EndReason,
    ProcessStatus,
)
from scheduler.runs.blame import Blame, Symptom, blame_of_failure
from scheduler.runs.processes import Process
from scheduler.state.endings import last_error


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker told of its own, and when that came."""

    when: float
    error: str
    reason: "EndReason.ValueType"


def ended(process: Process, entry: ProcessStatus, when: float, failure: Failure | None) -> Symptom:
    """One whose node says that it ended.

    Args:
        when: that was seen.
        failure: what a worker told of its own before.
    """
    code = entry.exit_code
    place = replace(process, pid=entry.pid or process.pid).place
    headline = f"{process.label} ({place}) ended {describe_exit(code)}"
    if entry.out_of_memory:
        headline += "; the kernel killed it, as memory had run out"
    elif code == -9:
        headline += "; the kernel does this too when memory runs out"
    if entry.note:
        headline += f"; it {entry.note}"
    error = failure.error if failure is not None else ""
    if not error and code > 0:
        error = last_error(entry.last_lines.splitlines())
    reason = reason_of_exit(code, error)
    if failure is not None:
        when = min(when, failure.when)
        if code >= 0 or failure.reason == END_OUT_OF_MEMORY:
            reason = failure.reason
    if entry.out_of_memory:
        reason = END_OUT_OF_MEMORY
    if process.role == SHARD:
        blame = Blame.SHARD_KILLED if code < 0 else Blame.SHARD_ENDED
        reason = reason if reason == END_OUT_OF_MEMORY else END_LOST_SHARD
    elif code < 0:
        blame = Blame.KILLED
    else:
        told = code or failure is not None
        blame = blame_of_failure(reason) if told else Blame.LEFT
    return Symptom(blame, when, headline, error, entry.last_lines, reason, process.label)


def failed(process: Process, failure: Failure) -> Symptom:
    """A worker that told of its failure, and whose end has not been seen."""
    return Symptom(
        blame_of_failure(failure.reason),
        failure.when,
        f"{process.label} ({process.place}) failed",
        failure.error,
        reason=failure.reason,
        process=process.label,
    )


def gone(process: Process, here: Sequence[str], how: str, when: float) -> Symptom:
    """One whose node, or standing shard, is gone.

    Args:
        here: labels of all processes of the job that were there.
        how: it went.
    """
    node = process.node
    kind = "standing shard" if process.standing else "node"
    return Symptom(
        Blame.NODE_LOST,
        when,
        f"{kind} {node.node_id} ({node.type + ' ' if node.type else ''}at {node.address}) {how}"
        + ("" if process.standing else f"; it ran {', '.join(here)}"),
        reason=END_LOST_SHARD if process.standing else END_LOST_NODE,
        process=f"{kind} {node.node_id}",
    )


def forgotten(process: Process, when: float) -> Symptom:
    """One that a node knows nothing of any more."""
    node = process.node
    return Symptom(
        Blame.NODE_LOST,
        when,
        f"node {node.node_id} (at {node.address}) was started again and has lost {process.label}",
        reason=END_LOST_NODE,
        process=process.label,
    )
