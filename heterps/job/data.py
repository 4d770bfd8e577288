"""Whether a job's data fits it, as far as can be seen where it is submitted."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib import import_module
from typing import Literal

from heterps.errors import DataMismatchError
from heterps.job.prepare import is_url, prepare
from protos.job_pb2 import DataSpec, JobSpec
from workers.model.code.digest import entry_digest


def prepare_and_check(job: JobSpec, on_line: Callable[[str], None] = lambda line: None) -> None:
    """Make a job's data, and see whether it fits; what seeing takes is imported meanwhile.

    Args:
        on_line: as of `prepare`.

    Raises:
        PrepareError, DataMismatchError
    """
    with ThreadPoolExecutor(1) as beside:
        if job.data.prepare and _can_be_seen(job):
            beside.submit(import_module, "workers.data.check")
        prepare(job, on_line)
    if job.data.prepare and job.entry_digest:  # it may have made a module that the model imports
        job.entry_digest = entry_digest(job)
    check_data(job)


def check_data(job: JobSpec) -> None:
    """Look at columns, types, what Parquet says of values, and first rows.

    Not of a URL or a source: nodes read these, with credentials that this machine may not have, and
    run the job's code.

    Raises:
        DataMismatchError: naming file, column, row and what was expected.
    """
    if not _can_be_seen(job):
        return
    from workers.data.check import check
    from workers.data.errors import DataError

    try:
        check(job)
    except DataError as error:
        raise DataMismatchError(str(error)) from None


def contents_of(job: JobSpec, split: Literal["train", "valid"]) -> tuple[str, str]:
    """What tells which files a job names for a split, and what tells what these hold.

    Both are empty where there are none, or none that `check_data` looks at.

    Raises:
        DataMismatchError: it cannot be read.
    """
    pattern = {"train": job.data.train, "valid": job.data.valid}[split]
    if not pattern or not _can_be_seen(job):
        return "", ""
    from workers.data.errors import DataError
    from workers.data.reader import Dataset

    named = DataSpec(path=job.data.path, train=pattern, join=job.data.join)
    try:
        contents = Dataset.of(job, split).contents
    except DataError as error:
        raise DataMismatchError(str(error)) from None
    return sha256(named.SerializeToString(deterministic=True)).hexdigest(), contents


def _can_be_seen(job: JobSpec) -> bool:
    return not is_url(job.data.path) and not job.data.source
