"""Workers that outlive others of their job, and cuts that outlive the job."""

from collections.abc import Collection

from protos.job_pb2 import JobSpec


def may_be_replaced(devices: Collection[str]) -> bool:
    """Whether workers may go over to another generation: NCCL binds none of them.

    Args:
        devices: "cpu" | "cuda", of each stage.
    """
    return "cuda" not in devices


def keeps_state(job: JobSpec) -> bool:
    """Whether a worker has all of its stage's state, for one in the place of another."""
    return not job.train.split_experts


def may_regroup(job: JobSpec, devices: Collection[str]) -> bool:
    """Whether workers may go over to another generation with what they have.

    Args:
        devices: as of `may_be_replaced`.
    """
    return keeps_state(job) and may_be_replaced(devices)


def keeps_cuts(job: JobSpec) -> bool:
    """Whether a job takes cuts that stay when it has its model, not only those that it moves by."""
    return bool(job.train.checkpoint.every or job.train.validate.every)
