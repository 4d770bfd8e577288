"""Where an attempt begins: at a cut of its own job, at one of an earlier job, or at the first step.

A cut is taken from what workers have reported of this very job, or from what was submitted with
it; nothing is looked for on any disk, where something else may lie by now.
"""

from dataclasses import dataclass

from protos.job_pb2 import JobSpec
from protos.naming import KEPT, TAKEN_OVER, kept_place, kept_with
from protos.scheduler_pb2 import Cut, JobStatus, ProgressReport


@dataclass(frozen=True, slots=True)
class Beginning:
    """Of an attempt.

    Attributes:
        step: updates that it begins with; 0: it begins at the first step.
        samples: trained until then.
        place: folder or URL of the cut; empty for none.
    """

    step: int = 0
    samples: int = 0
    place: str = ""


def beginning_of(status: JobStatus, job: JobSpec, scheduler: str) -> Beginning:
    """The newest cut of the job; before it has any, that of the job that it goes on from.

    Args:
        scheduler: the address of the one that leads, which keeps what was kept before.
    """
    if status.cuts:
        cut = status.cuts[-1]
        return Beginning(cut.step, cut.samples, kept_with(cut.place, scheduler))
    origin = job.train.resume
    if origin.step:
        place = taken_over(status.job_id, origin.place, scheduler)
        return Beginning(origin.step, origin.samples, place)
    return Beginning()


def taken_over(job_id: str, place: str, scheduler: str) -> str:
    """Where a job finds what it has from an earlier one: with the scheduler as files of its own."""
    if not place.startswith(KEPT):
        return place
    _, _, folder = kept_place(place)
    step = folder.rpartition("/")[2]
    return f"{KEPT}{scheduler}/{job_id}/{TAKEN_OVER}" + (f"/{step}" if step else "")


def leads_cuts(report: ProgressReport, generation: int) -> bool:
    """Whether a worker tells of the job's cuts who may: of the generation of the job's workers.

    One that was given up may tell of a cut after that which the others have gone back to.
    """
    leads = (report.stage, report.rank, report.generation) == (0, 0, generation)
    return leads and report.HasField("cuts")


def descended(report: ProgressReport, beginning: Beginning) -> list[Cut]:
    """The cuts that a report names, the oldest first, less those of states that are given up.

    An attempt that begins with an older cut leaves those after it behind: what it computes from
    there on takes their place.
    """
    found = sorted(report.cuts.cuts, key=lambda cut: cut.step)
    return [cut for cut in found if cut.attempt == report.attempt or cut.step <= beginning.step]
