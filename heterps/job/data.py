"""Whether a job's data fits it, as far as can be seen where it is submitted."""

from heterps.errors import DataMismatchError
from heterps.job.prepare import is_url
from protos.job_pb2 import JobSpec


def check_data(job: JobSpec) -> None:
    """Look at columns, types, what Parquet says of values, and first rows.

    Not of a URL or a source: nodes read these, with credentials that this machine may not have, and
    run the job's code.

    Raises:
        DataMismatchError: naming file, column, row and what was expected.
    """
    if is_url(job.data.path) or job.data.source:
        return
    from workers.data.check import check
    from workers.data.errors import DataError

    try:
        check(job)
    except DataError as error:
        raise DataMismatchError(str(error)) from None
