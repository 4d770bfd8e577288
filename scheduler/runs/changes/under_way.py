"""The change that an attempt has under way: how it begins, has its units, and ends."""

from collections import Counter
from collections.abc import Sequence

from protos.decision_pb2 import Decision
from protos.generations import may_regroup
from protos.scheduler_pb2 import JobStatus, Move, NodeStatus
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import Interrupted
from scheduler.runs.change import Change, ChangeRefusedError, PlanChange, check
from scheduler.runs.launch import devices_of
from scheduler.runs.states import State
from scheduler.state.packing import Group


def request(attempt: Attempt, change: PlanChange) -> JobStatus:
    """Have a job go over to another plan; from any thread. It trains on until that is ready.

    Returns:
        The job's status; what comes of the change is the next of its `moves`.

    Raises:
        ChangeRefusedError: it cannot, or another change is under way.
    """
    context, job_id = attempt.context, attempt.id.job_id
    spec = context.store.spec(job_id)
    with attempt.record.lock:
        follower = attempt.follower
        running = attempt.state is State.RUNNING and not attempt.is_cancelled()
        if not running or follower is None or spec is None:
            raise ChangeRefusedError(f"job {job_id} does not train")
        if attempt.change is not None or attempt.record.is_regrouping:
            raise ChangeRefusedError(f"job {job_id} is going over to other workers already")
        after = change.decision or attempt.decision
        check(attempt.decision, after)
        plans = attempt.decision, after
        if not all(may_regroup(spec, devices_of(plan)) for plan in plans):
            raise ChangeRefusedError(
                f"job {job_id}: workers on GPUs, or with split_experts, cannot go over to "
                "another plan while they train; submit --resume the job with the plan"
            )
        made = Decision()
        made.CopyFrom(after)
        made.ClearField("measured")
        found = Change.of(change, attempt.decision, made, attempt.id.number, attempt.step)
        try:
            attempt.record.note_change(found.move)
        except Interrupted:
            raise ChangeRefusedError(f"job {job_id} does not train") from None
        attempt.change = found
        status = context.jobs.get(job_id) or JobStatus(job_id=job_id)
    follower.wake()
    return status


def reserve(
    attempt: Attempt,
    change: Change,
    groups: Sequence[Group],
    singles: Sequence[str],
    held: Sequence[str],
) -> list[NodeStatus] | None:
    """Take units for a change, beside those that the job holds; None: there are too few.

    Args:
        groups, singles: as of `Nodes.reserve`.
        held: node ids, one for each unit of what will be replaced, which may be used again.

    Raises:
        Interrupted: it is not under way any more.
    """
    with attempt.record.lock:
        if attempt.change is not change:
            raise Interrupted
        nodes, avoid = attempt.context.nodes, change.wanted.avoid
        placed = nodes.reserve(attempt.id.job_id, groups, singles, held=held, avoid=avoid)
        if placed is not None:
            more = Counter(node.node_id for node in placed) - Counter(held)
            attempt.record.hold(more.elements())
        return placed


def end(attempt: Attempt, move: Move) -> None:
    """None is under way any more; tell the job's owner of it, or what it failed of, once."""

    def tell(status: JobStatus) -> None:
        if move not in status.moves:
            status.moves.append(move)

    with attempt.record.lock:
        attempt.record.note_change(move)
        attempt.context.jobs.change(attempt.id.job_id, tell)
        attempt.change = None
        attempt.record.note_change(None)
