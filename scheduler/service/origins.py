"""What a job takes over from an earlier one: its cut to go on from, its weights to begin with.

Files that the scheduler keeps of the earlier job become files of the new one, too: its processes
may read no others, and the earlier job may be forgotten meanwhile.
"""

import grpc

from protos.job_pb2 import JobSpec
from protos.naming import KEPT, TAKEN_OVER, kept_place
from protos.scheduler_pb2 import JobStatus
from scheduler.service.access import Access
from scheduler.service.artifacts import Artifacts
from scheduler.state.jobs import Jobs
from scheduler.state.store import TERMINAL

_CUTS = "cuts"


class GoneError(ValueError):
    """What a job would take over is not kept any more."""


class Origins:
    """Looks after what jobs take over.

    Args:
        artifacts: what is kept of jobs.
        jobs: all of them.
        access: whose jobs a caller may see.
    """

    def __init__(self, artifacts: Artifacts, jobs: Jobs, access: Access) -> None:
        self._artifacts, self._jobs, self._access = artifacts, jobs, access

    def check(self, job: JobSpec, context: grpc.ServicerContext) -> None:
        """The call's end where a job would take over what its caller may not see, or what runs."""
        origin = job.train.resume
        if origin.step:
            self._access.require(origin.job_id, context)
            state = self._jobs.state(origin.job_id)
            if state and state not in TERMINAL:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"job {origin.job_id}: has not ended; expected one that has, as two jobs would "
                    "go on from the same step. Cancel it first, or wait for its end",
                )
        for place in _kept(job):
            try:
                source = kept_place(place)[1]
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"job.train: {error}")
            self._access.require(source, context)

    def take_over(self, job: JobSpec, job_id: str) -> None:
        """Make the files that a job needs of an earlier one its own.

        Raises:
            GoneError: they are not kept any more.
        """
        for place in _kept(job):
            _, source, folder = kept_place(place)
            files = self._artifacts.files(source)
            head, _, step = folder.rpartition("/")
            manifest = f"{folder}/cut.json" if folder else "model.json"
            if manifest not in files:
                raise GoneError(
                    f"job {source}: {f'its cut of step {step}' if step else 'its model'} is not "
                    "kept any more: room was needed for later jobs, or newer ones took its place"
                )
            names = {
                name: f"{TAKEN_OVER}/{name.removeprefix(f'{head}/')}"
                for name in files
                if (_is_of_cut(name, head, step) if folder else _is_of_model(name))
            }
            self._artifacts.lend(source, job_id, names)

    def drop_gone(self, status: JobStatus) -> None:
        """Leave out of a job's cuts those that are not kept any more."""
        if not any(cut.place.startswith(KEPT) for cut in status.cuts):
            return
        files = self._artifacts.files(status.job_id)
        there = [
            cut
            for cut in status.cuts
            if not cut.place.startswith(KEPT) or f"{kept_place(cut.place)[2]}/cut.json" in files
        ]
        del status.cuts[:]
        status.cuts.extend(there)

    def forget(self, job_id: str) -> None:
        """Let go of the cuts of a job that is not kept any more, and of what it took over."""
        for folder in (_CUTS, TAKEN_OVER):
            self._artifacts.remove(job_id, folder)


def _kept(job: JobSpec) -> list[str]:
    places = (job.train.resume.place, job.train.warm_start)
    return [place for place in places if place.startswith(KEPT)]


def _is_of_cut(name: str, cuts: str, step: str) -> bool:
    """Whether a file in the folder of cuts belongs to this one or those before, or to all."""
    inside = name.removeprefix(f"{cuts}/")
    folder = inside.partition("/")[0]
    return name != inside and (not folder.isdecimal() or int(folder) <= int(step))


def _is_of_model(name: str) -> bool:
    return name.partition("/")[0] not in (_CUTS, TAKEN_OVER)
