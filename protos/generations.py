"""Workers that outlive others of their job: they go over to another generation together."""

from collections.abc import Collection

from protos.job_pb2 import JobSpec


def may_regroup(job: JobSpec, devices: Collection[str]) -> bool:
    """Whether workers may go over to another generation: torch's collectives bind none of them.

    Args:
        devices: "cpu" | "cuda", of each stage.
    """
    return not job.train.split_experts and "cuda" not in devices
