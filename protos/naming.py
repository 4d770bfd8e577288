"""Names that several rooms must agree on."""


def table_prefix(job_id: str) -> str:
    """What the names of a job's tables begin with on the parameter servers.

    The length in front keeps job `a` from claiming the tables of job `a.b`.
    """
    return f"{len(job_id)}.{job_id}."
