"""Workers that outlive others of their job, and cuts that outlive the job."""

from collections.abc import Collection

from protos.job_pb2 import JobSpec


def may_regroup(job: JobSpec, devices: Collection[str]) -> bool:
    """Whether workers may go over to another generation: torch's collectives bind none of them.

    Args:
        devices: "cpu" | "cuda", of each stage.
    """
    return not job.train.split_experts and "cuda" not in devices


def keeps_cuts(job: JobSpec) -> bool:
    """Whether a job takes cuts that stay when it has its model, not only those that it moves by."""
    return bool(job.train.checkpoint.every or job.train.validate.every)
