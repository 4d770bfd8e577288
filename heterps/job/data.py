"""Whether a job's data fits it, as far as can be seen where it is submitted."""

from heterps.errors import DataMismatchError
from heterps.job.prepare import is_url
from protos.job_pb2 import JobSpec


def check_data(job: JobSpec) -> None:
    """Look at columns, types, what Parquet says of values, and first rows; not at those of a URL.

    Raises:
        DataMismatchError: naming file, column, row and what was expected.
    """
    if is_url(job.data.path):
        return  # nodes read it, with credentials that this machine may not have
    from workers.data.check import check
    from workers.data.errors import DataError

    try:
        check(job)
    except DataError as error:
        raise DataMismatchError(str(error)) from None
