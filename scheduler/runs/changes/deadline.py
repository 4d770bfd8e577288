"""A job's deadline: what plans are asked for, and what is left of the job."""

from typing import Final

from protos.decision_pb2 import Decision, Resources
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobStatus, ProgressReport
from scheduler.problem.deadline import MARGIN
from scheduler.replanning.measure import Measurement

ENDING_S: Final = 10.0  # to start and to save, of which no plan knows
MOVING_S: Final = 30.0  # to go over to another plan, where nothing was measured
# How much faster than the deadline asks sure units are to be: the more, the later they are needed.
_SPARE = (2.0, 1.5, 1.25, MARGIN, 1.0)


def hours_for_all(status: JobStatus, job: JobSpec, samples: float, now: float) -> float:
    """Hours in which a plan is to train all samples, so that those that are left are done in time.

    Zero where there is no deadline; as submitted where it is over.

    Args:
        samples: in all.
        now: seconds since the epoch.
    """
    hours = job.schedule.finish_by_hours
    left_s = finish_at(status, job) - ENDING_S - now
    done = min(status.from_samples / samples, 1.0) if samples else 0.0
    if not hours or left_s <= 0 or done >= 1:
        return hours
    return min(hours, left_s / 3600 / (1 - done))


def finish_at(status: JobStatus, job: JobSpec) -> float:
    """When it is to be done, in seconds since the epoch: so long after it left the queue first."""
    return status.began_at + job.schedule.finish_by_hours * 3600


def unsure(resources: Resources) -> list[str]:
    """Types whose units may be taken away."""
    return [kind.name for kind in resources.types if kind.interruptions_per_hour]


def may_be_struck(decision: Decision) -> bool:
    """Whether a plan has units that may be taken away."""
    used = {stage.type for stage in decision.stages}
    used |= {decision.workload.ps_type} if decision.ps_units else set()
    return bool(used & set(unsure(decision.resources)))


def sure_plan(decision: Decision, finish_by_hours: float) -> Decision | None:
    """The plan of units that stay to go over to: faster than the deadline asks, where that can be.

    Raises:
        InputError: the decision lacks its inputs.
    """
    # Brings NumPy: only where there is a deadline and units may be taken away.
    from scheduler.planning.planner import plan

    workload, floor = decision.workload, decision.workload.samples / (finish_by_hours * 3600)
    excluded = [*decision.excluded, *unsure(decision.resources)]
    for spare in _SPARE:
        found = plan(
            workload,
            decision.resources,
            spare * floor,
            method="exact",
            pin=dict(decision.pin) or None,
            exclude=list(dict.fromkeys(excluded)),
            max_price_per_hour=decision.max_price_per_hour or None,
        )
        if found.feasible:
            message = found.to_message()
            message.min_throughput = decision.min_throughput
            message.finish_by = decision.finish_by
            return message
    return None


def slower(
    measurement: Measurement | None, decision: Decision, report: ProgressReport | None
) -> float:
    """How many times longer a sample takes than was predicted, at least 1.

    Args:
        report: the newest, which tells what validations take besides the steps.
    """
    pace_s = measurement.pace.seconds if measurement is not None else 0.0
    times = max(1.0, pace_s * decision.throughput * (1 - decision.workload.overhead))
    if report is not None and report.train_seconds:
        times *= 1 + report.apart_s / report.train_seconds
    return times


def seconds_left(status: JobStatus, sure: Decision) -> float:
    """What a plan of sure units takes, by what is predicted, for what the last cut lacks."""
    samples = sure.workload.samples
    if status.step:  # a workload that was given need not be right about them
        samples = max(samples, status.samples / status.step * status.total_steps)
    done = max([status.from_samples, *(cut.samples for cut in status.cuts)])
    pace = sure.throughput * (1 - sure.workload.overhead)
    return max(0.0, samples - done) / pace
