"""Finding what a user names: a job here or on the cluster, a decision file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heterps.commands import named
from heterps.errors import HeterpsError, NoDecisionError, UnknownJobError, UnreachableError

if TYPE_CHECKING:
    from heterps.client.client import Client
    from heterps.client.records import Job, PlanUse
    from scheduler import Decision
    from scheduler.replanning.proposal import Proposal


def find(prefix: str | None) -> "tuple[Client | None, Job]":
    """A job, with a client of the cluster that has it; None for an archived one.

    The latest job is the latest of both.

    Raises:
        UnknownJobError, UnreachableError: there is none, or the cluster that may know it is away.
    """
    from heterps.client import archive
    from heterps.client.calls import match

    archived = archive.jobs()
    live: list[Job] = []
    found_client: Client | None = None
    problem: HeterpsError | None = None
    try:
        found_client = named.client()
        live = found_client.jobs()
    except UnreachableError as error:
        problem = error
        if found_client is not None:
            found_client.close()
    jobs = {job.job_id: job for job in [*archived, *live]}
    order = sorted(jobs.values(), key=lambda job: job.submitted_at)
    try:
        found = jobs[match(prefix, [job.job_id for job in order])]
    except UnknownJobError:
        if problem is not None:  # the cluster that does not answer may know it
            not_here = f"job {prefix!r} is not among those kept here, and " if prefix else ""
            raise UnreachableError(f"{not_here}{problem}") from None
        raise
    if any(job.job_id == found.job_id for job in live):
        return found_client, found
    if found_client is not None and problem is None:
        found_client.close()
    return None, found


@dataclass(frozen=True, slots=True)
class Found:
    """A job, its decision where it came to one, and the proposal to leave it that stands.

    Attributes:
        plans: that it has trained under, the oldest first.
    """

    job: "Job"
    decision: "Decision | None"
    plans: "Sequence[PlanUse]" = ()
    proposal: "Proposal | None" = None


def find_with_decision(prefix: str | None) -> Found:
    """A job and what was decided for it.

    Raises:
        UnknownJobError, UnreachableError: as `find`.
    """
    from heterps.client import archive
    from heterps.commands import following
    from scheduler import Decision

    found_client, job = find(prefix)
    if found_client is None:
        archived = archive.decision(job.job_id)
        decided = Decision.from_message(archived) if archived is not None else None
        return Found(job, decided, archive.plans(job.job_id))
    with found_client:
        decision = following.decision_of(found_client, job.job_id)
        record, plans = found_client.replan(job.job_id), found_client.plans(job.job_id)
    if not record.HasField("proposal"):
        return Found(job, decision, plans)
    from scheduler.replanning.proposal import Proposal

    return Found(job, decision, plans, Proposal.from_message(record.proposal))


def decision_named(name: str) -> "tuple[str, Decision]":
    """The decision of a file or of a job, and what to call it.

    Raises:
        InputError: a file that holds no decision.
        NoDecisionError: a job that came to none.
    """
    from scheduler import Decision

    path = Path(name)
    if path.suffix.lower() == ".json" or path.is_file():
        return path.stem, Decision.load(path)
    found = find_with_decision(name)
    if found.decision is None:
        raise NoDecisionError(f"job {found.job.job_id}: it has no decision")
    return found.job.job_id, found.decision
