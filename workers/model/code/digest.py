"""What the files of a job's own code say that its training depends on, in one number."""

import hashlib
from pathlib import Path

from protos.job_pb2 import JobSpec


def entry_files(job: JobSpec) -> list[Path]:
    """The files of the model, of the loss and of the callbacks, which may end the training."""
    entries = (job.model.entry, job.model.loss, *job.model.callbacks)
    return [Path(job.directory, entry.rpartition(":")[0]) for entry in entries if entry]


def entry_digest(job: JobSpec) -> str:
    """The sha256 of these files, one after the other.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    for file in entry_files(job):
        digest.update(file.read_bytes())
    return digest.hexdigest()
