"""The plan that a job is to move to, when it is asked to."""

from protos.decision_pb2 import Decision
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import ChangeRefusedError


def given(attempt: Attempt, plan: Decision) -> Decision:
    """A plan that was given, with the job's own workload and resources where it has none."""
    made = Decision()
    made.CopyFrom(plan)
    if not made.HasField("workload"):
        made.workload.CopyFrom(attempt.decision.workload)
    if not made.HasField("resources"):
        made.resources.CopyFrom(attempt.decision.resources)
    return made


def planned_anew(attempt: Attempt, samples: int) -> Decision:
    """The best plan for the rest of a job, by what its run was measured to take.

    Args:
        samples: that it has trained.

    Raises:
        ChangeRefusedError: that is the plan that it has, or too little was measured.
        InputError: its decision has no workload to plan with.
    """
    # These bring NumPy: only when they are needed.
    from scheduler.decision.record import Decision as Record
    from scheduler.replanning.replan import propose

    job_id, measurement = attempt.id.job_id, attempt.measurement()
    left = attempt.decision.workload.samples - samples
    if measurement is None or not measurement.counts or left <= 0:
        raise ChangeRefusedError(
            f"job {job_id}: its run was not measured for long enough to plan anew; give a plan, or "
            "try again later"
        )
    proposal = propose(Record.from_message(attempt.decision), measurement, left)
    if not proposal.moves:
        raise ChangeRefusedError(f"job {job_id} has the best plan, by what its run was measured")
    return proposal.proposed.to_message()
