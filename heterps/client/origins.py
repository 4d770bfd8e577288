"""What a job takes over from an earlier one: all of its state, or its weights and rows alone."""

import os
from collections.abc import Iterable
from pathlib import Path

from heterps.client.records import Cut, Job, State
from heterps.errors import HeterpsError
from heterps.job.checkpoints import CUT
from protos.job_pb2 import JobSpec, Origin
from protos.naming import KEPT
from protos.training import differences
from workers.model.code.digest import entry_files


class OriginError(HeterpsError):
    """A job that cannot go on from what was named; nothing was submitted."""


def chosen(job: Job, step: int | None) -> Cut:
    """A job's cut of a step, or its newest.

    Raises:
        OriginError: it is not there; says which are.
    """
    cuts = there(job.cuts)
    if not cuts:
        raise OriginError(
            f"job {job.job_id}: has no checkpoint; expected one that was submitted with "
            "train.checkpoint.every and came so far"
        )
    found = cuts if step is None else [cut for cut in cuts if cut.step == step]
    if not found:
        steps = ", ".join(str(cut.step) for cut in cuts)
        raise OriginError(
            f"job {job.job_id}: has no checkpoint of step {step}; expected one of {steps}"
        )
    return found[-1]


def there(cuts: Iterable[Cut]) -> list[Cut]:
    """Those of a job's cuts that are not known to be gone."""
    return [cut for cut in cuts if not _is_gone(cut.place)]


def origin_of(job: Job, step: int | None) -> Origin:
    """Where a job goes on exactly that takes up this one.

    Raises:
        OriginError: it has no such cut, or has not ended.
    """
    if not job.state.is_final:
        raise OriginError(
            f"job {job.job_id}: is {job.state}; expected one that has ended, as two jobs would go "
            f"on from the same step. Stop it with `heterps cancel {job.job_id}`"
        )
    cut = chosen(job, step)
    return Origin(job_id=job.job_id, step=cut.step, place=cut.place, samples=cut.samples)


def weights_of(job: Job, step: int | None) -> str:
    """Where the weights and rows are that `JOB[@STEP]` names: the job's model, or a cut.

    Raises:
        OriginError: there are none.
    """
    if step is None and job.state is State.SUCCEEDED and job.output:
        return job.output
    return chosen(job, step).place


def take_up(job: JobSpec, before: JobSpec, job_id: str) -> None:
    """Make a job the same training as an earlier one: its model, data and code are those.

    Args:
        before: what was submitted as `job_id`.

    Raises:
        OriginError: it is another training; names the key.
    """
    check_same(job, before, job_id)
    if job.output:
        job.output = os.path.normpath(Path(job.directory, job.output))
    job.data.CopyFrom(before.data)
    job.model.CopyFrom(before.model)
    job.directory, job.code = before.directory, before.code
    job.code_digest, job.entry_digest = before.code_digest, before.entry_digest


def check_same(job: JobSpec, before: JobSpec, job_id: str) -> None:
    """Refuse a job that is another training than an earlier one.

    Raises:
        OriginError: names what differs.
    """
    for key, got, expected in differences(job, before):
        raise OriginError(
            f"{key}: got {got}, expected {expected}, as of {job_id}, to go on from its checkpoint. "
            f"To begin with its weights alone use train.from: {job_id}"
        )
    if job.entry_digest and before.entry_digest and job.entry_digest != before.entry_digest:
        files = " or ".join(file.name for file in entry_files(job))
        raise OriginError(
            f"model.entry: {files} is not as it was for {job_id}, or what it imports from beside "
            "it; expected the same code, to go on from its checkpoint. To begin with its weights "
            f"alone use train.from: {job_id}"
        )


def _is_gone(place: str) -> bool:
    """Whether this machine sees the folder of a job's cuts, and one of them is not there."""
    if place.startswith(KEPT) or "://" in place:
        return False
    return Path(place).parent.is_dir() and not Path(place, CUT).is_file()
