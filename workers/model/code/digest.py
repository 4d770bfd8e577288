"""What the files of a job's own code say that its training depends on, in one number."""

import hashlib
from pathlib import Path

from chassis.rooms import imported
from protos.job_pb2 import JobSpec


def entry_files(job: JobSpec) -> list[Path]:
    """The files of the model, the loss, the metrics and the callbacks, which may end training."""
    entries = (job.model.entry, job.model.loss, *job.model.metrics, *job.model.callbacks)
    return [Path(job.directory, entry.rpartition(":")[0]) for entry in entries if entry]


def entry_digest(job: JobSpec) -> str:
    """The sha256 of these files and of what they import from beside them, one after the other.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    files = [file.resolve() for file in entry_files(job)]
    others = {
        other
        for file in files
        for other in imported(file, (file.parent, Path(job.directory).resolve()))
    }
    for file in (*files, *sorted(others.difference(files))):
        digest.update(file.read_bytes())
    return digest.hexdigest()
