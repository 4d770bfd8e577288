"""The plan that a job is to move to, when it is asked to."""

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import BestPlanError, ChangeRefusedError
from scheduler.runs.changes.anew import for_job, on_nodes_now, propose_now
from scheduler.runs.constraints import keep_linear


def given(attempt: Attempt, plan: Decision) -> Decision:
    """A plan that was given, with the job's own workload and resources where it has none."""
    made = Decision()
    made.CopyFrom(plan)
    if not made.HasField("workload"):
        made.workload.CopyFrom(attempt.decision.workload)
    if not made.HasField("resources"):
        made.resources.CopyFrom(attempt.decision.resources)
    keep_linear(made.workload, attempt.decision.workload.linear)
    return made


def planned_anew(attempt: Attempt, spec: JobSpec) -> Decision:
    """The best plan for the rest of a job, by what its run was measured to take.

    Raises:
        BestPlanError: that is the plan that it has.
        ChangeRefusedError: too little was measured, or no plan meets its demands any more.
        InputError, OfferError: it cannot be planned on what is there.
    """
    job_id, measurement = attempt.id.job_id, attempt.measurement()
    proposal = None
    if measurement is not None and measurement.counts:
        offered = on_nodes_now(attempt, spec)
        proposal = propose_now(attempt, spec, measurement, offered=offered)
    if proposal is None:
        raise ChangeRefusedError(
            f"job {job_id}: its run was not measured for long enough to plan anew; give a plan, or "
            "try again later"
        )
    if not proposal.proposed.feasible:
        raise ChangeRefusedError(f"job {job_id}: {proposal.proposed.plan.reason}")
    if not proposal.moves:
        raise BestPlanError(
            f"job {job_id} has the best plan already, by what its run was measured to take"
        )
    return for_job(proposal.proposed.to_message(), attempt.decision)
